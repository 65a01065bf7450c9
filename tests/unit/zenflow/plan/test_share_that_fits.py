"""How much of the optimizer an accelerator can hold, as arithmetic: beside all that will exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.model import typical
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Model, Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import RankFacts, ZenFlowFacts
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place

GB, GIB, UNITS = 10**9, 2**30, 1024


def facts_of(model: Model, ranks: Machine, setup: Setup, total: int) -> ZenFlowFacts:
    """What a run knows once only its weights are on an accelerator of `total` bytes, if its host is
    too small to begin with the whole optimizer."""
    partitions = tuple(setup.partitions(model, ranks))
    whole = sum(run.numel * run.times for run in partitions)
    whole *= 1 if setup.partitions_weights else ranks.ranks
    free = max(0, total - model.itemsize * whole)
    rank = RankFacts(partitions, free, total, host_free=(("machine", 0),))
    return ZenFlowFacts((rank,), setup.caller(model, ranks))


def units_that_fit(facts: ZenFlowFacts, setup: Setup, reserve: float = 0.15) -> int:
    """The share on the accelerator that is chosen if it is left open, in units."""
    assert setup.zenflow is not None
    section = setup.zenflow.model_dump(exclude_unset=True) | {"offload_reserve_fraction": reserve}
    return round((1.0 - decide(facts, ZenFlowConfig(**section), ratio="auto").host_share) * UNITS)


def peak_at(model: Model, ranks: Machine, setup: Setup, host_share: float) -> int:
    """What our plan of memory says of a step and a backward pass, without activations."""
    plan = plan_memory(model, ranks, replace(setup, host_share=host_share))
    phases = Phase.BETWEEN, Phase.BACKWARD, Phase.STEP
    return max(
        sum(part.nbytes for part in plan.parts[Place.ACCELERATOR, phase]) for phase in phases
    )


def test_seven_billion_parameters_on_80_gb() -> None:
    """Half of the optimizer would need 82.8 GiB, so a run that took 61 % ended in its first
    step."""
    model = Model(7 * GB, typical(7 * GB).largest, "bfloat16")
    setup = Setup(stage=2, zenflow=ZenFlowConfig())
    total = 80 * GIB
    facts = facts_of(model, Machine(1, 1), setup, total)
    share = units_that_fit(facts, setup) / UNITS
    assert 0.15 < share < 0.3
    assert peak_at(model, Machine(1, 1), setup, 1.0 - share) + 0.1 * total < total
    assert peak_at(model, Machine(1, 1), setup, 0.5) > total
    sharded = Setup(stage=3, zenflow=setup.zenflow)
    assert units_that_fit(facts_of(model, Machine(8, 8), sharded, total), sharded) == UNITS


@st.composite
def runs(draw: Any) -> tuple[Model, Machine, Setup, int]:
    stage: Literal[2, 3] = draw(st.sampled_from([2, 3]))
    params = draw(st.integers(10**8, 2 * 10**10))
    zenflow = draw(
        st.sampled_from(
            [
                {},
                {},
                {"hide_transfers": False},
                {"update_rule": "selective", "topk_ratio": 0.05, "update_interval": 2},
            ]
        )
    )
    section = ZenFlowConfig(**zenflow)
    setup = Setup(stage=stage, zenflow=section, accumulation=draw(st.sampled_from([1, 4])))
    ranks = draw(st.sampled_from([1, 2, 8]))
    return (
        Model(params, typical(params).largest, "bfloat16"),
        Machine(ranks, ranks),
        setup,
        draw(st.integers(8, 192)),
    )


@given(runs())
@settings(deadline=None)
def test_what_is_chosen_fits_by_our_plan_and_a_little_more_memory_never_means_less(
    run: tuple[Model, Machine, Setup, int],
) -> None:
    model, ranks, setup, gib = run
    facts = facts_of(model, ranks, setup, gib * GIB)
    units = units_that_fit(facts, setup)
    assert units <= units_that_fit(facts_of(model, ranks, setup, (gib + 8) * GIB), setup)
    assume(units > 0)
    live = 2 * 2 * 10**9 if setup.stage == 3 else 0  # gathered layers count as activations
    padding = 8192
    assert peak_at(model, ranks, setup, 1.0 - units / UNITS) <= gib * GIB + live + padding


@pytest.mark.parametrize("short", ["later", "reserve"])
def test_nothing_steps_on_an_accelerator_that_has_no_room(short: str) -> None:
    model = Model(GB, typical(GB).largest, "bfloat16")
    setup = Setup(stage=2, zenflow=ZenFlowConfig())
    facts = facts_of(model, Machine(1, 1), setup, 24 * GIB)
    assert units_that_fit(facts, setup) > 0
    if short == "reserve":
        assert units_that_fit(facts, setup, reserve=0.99) == 0
        return
    buckets = replace(facts, caller=replace(facts.caller, bucket_bytes=40 * GIB))
    assert units_that_fit(buckets, setup) == 0
