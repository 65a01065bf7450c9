"""A profile shows the parts of each system by name; without a profiler the names cost next to
nothing."""

from __future__ import annotations

import timeit
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from deepspeed import comm as dist
from torch.profiler import ProfilerActivity, profile

from deepspeed_ext.runtime.timing import in_profile
from tests.support.compare import base_config
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

STEPS = 4
CONFIGS = {
    "zenflow": zenflow_config(2, **RULES["predictive"]),
    "flatten": base_config(1, torch.bfloat16),
    "gather": base_config(3, torch.bfloat16),
}
CONFIGS["flatten"]["zero_optimization"]["flatten_tier"] = "distributed"
CONFIGS["gather"]["zero_optimization"] |= {
    "stage3_allgather_single_param": True,
    "stage3_param_persistence_threshold": 0,
}
EXPECTED = {
    "zenflow": {
        "startup.flatten",
        "startup.optimizer_process",
        *(
            f"zenflow.{part}"
            for part in ("begin_step", "step_partition", "finish_weights", "end_step")
        ),
    },
    "flatten": {"startup.flatten", *(f"flatten.{part}" for part in ("pack", "fill", "exchange"))},
    "gather": {"gather.fetch", "gather.wait"},
}


def ranges_of(config: dict, profiled: bool) -> Counter[str]:
    """Our ranges in a profile of the start and some steps, by name, and how often each occurs."""
    with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext() as found:
        engine = make_engine(config)
        train(engine, batches(STEPS, dist.get_rank()))
    engine.destroy()
    events = found.events() if found is not None else []
    prefix = "deepspeed_ext."
    return Counter(
        event.name.removeprefix(prefix) for event in events if event.name.startswith(prefix)
    )


@pytest.mark.parametrize("system", CONFIGS)
def test_a_profile_shows_the_parts_by_name(system: str) -> None:
    for found in run_ranks(2, ranges_of, CONFIGS[system], profiled=True):
        assert EXPECTED[system] <= set(found)
        assert all(" " not in name for name in found)
        if system == "zenflow":
            assert {
                found[f"zenflow.{part}"] for part in ("begin_step", "finish_weights", "end_step")
            } == {STEPS}
        # one range per fetch, not per parameter; the wait of each is the coordinator's
        if system == "gather":
            assert found["gather.fetch"] <= found["gather.wait"]


def test_without_a_profiler_there_is_no_range() -> None:
    block = in_profile("a.part")
    assert isinstance(block, nullcontext)
    count = 2000
    each = min(timeit.repeat(lambda: in_profile("a.part"), number=count, repeat=5)) / count
    assert each < 20e-6  # measured: below 1e-6; a busy machine may take longer
