"""How much of the optimizer an accelerator can hold, as arithmetic: beside all that will exist."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.parts import Phase, Place
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, typical_largest
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.step.accelerator_share import ShareFacts, bytes_beside_share, units_that_fit
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES
from deepspeed_ext.zenflow.worker.sizes import gradient_bytes

GB, GIB, UNITS = 10**9, 2**30, 1024


def facts_of(model: Model, ranks: Ranks, setup: Setup, total: int, reserve: float = 0.15) -> ShareFacts:
    """What a run knows once only its weights are on an accelerator of `total` bytes."""
    partitions = [run.numel for run in setup.partitions(model, ranks) for _ in range(run.times)]
    summed, handed = setup.accumulation_dtype(model), setup.handed_over_dtype(model)
    items = model.itemsize, DTYPE_BYTES[summed], DTYPE_BYTES[handed]
    whole = sum(partitions) * (1 if setup.partitions_weights else ranks.count)
    gradients = gradient_bytes(sum(partitions), max(partitions), *items, flattens=setup.partitions_weights)
    buckets = model.itemsize * setup.reduce_bucket_size
    publish = setup.publish_dtype(model)
    beside = partial(bytes_beside_share, setup.rule, publish, handed, model.itemsize, setup.hides_transfers)
    return ShareFacts(
        numels=partitions,
        block_size=setup.rule.block_size,
        layout=setup.rule.layout,
        free=total - model.itemsize * whole,
        total=total,
        reserve_fraction=reserve,
        later=gradients + buckets,
        beside=beside,
    )


def peak_at(model: Model, ranks: Ranks, setup: Setup, host_share: float) -> int:
    """What our plan of memory says of a step and a backward pass, without activations."""
    plan = plan_memory(model, ranks, replace(setup, host_share=host_share))
    phases = Phase.BETWEEN, Phase.BACKWARD, Phase.STEP
    return max(sum(part.nbytes for part in plan.parts[Place.ACCELERATOR, phase]) for phase in phases)


def test_seven_billion_parameters_on_80_gb() -> None:
    """Half of the optimizer would need 82.8 GiB, so a run that took 61 % ended in its first step."""
    model = Model(7 * GB, typical_largest(7 * GB), "bfloat16")
    setup = Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1))
    total = 80 * GIB
    facts = facts_of(model, Ranks(1, 1), setup, total)
    share = units_that_fit(facts) / UNITS
    assert 0.15 < share < 0.3
    assert peak_at(model, Ranks(1, 1), setup, 1.0 - share) + 0.1 * total < total
    assert peak_at(model, Ranks(1, 1), setup, 0.5) > total
    assert units_that_fit(facts_of(model, Ranks(8, 8), Setup(stage=3, zenflow=setup.zenflow), total)) == UNITS


@st.composite
def runs(draw: Any) -> tuple[Model, Ranks, Setup, int]:
    stage: Literal[2, 3] = draw(st.sampled_from([2, 3]))
    params = draw(st.integers(10**8, 2 * 10**10))
    zenflow = draw(
        st.sampled_from(
            [
                {"update_interval": 1},
                {"update_interval": 2},
                {},
                {"hide_transfers": False},
                {"update_rule": "selective", "topk_ratio": 0.05, "update_interval": 2},
            ]
        )
    )
    section = ZenFlowConfig(**zenflow)
    setup = Setup(stage=stage, zenflow=section, accumulation=draw(st.sampled_from([1, 4])))
    ranks = draw(st.sampled_from([1, 2, 8]))
    return Model(params, typical_largest(params), "bfloat16"), Ranks(ranks, ranks), setup, draw(st.integers(8, 192))


@given(runs())
def test_what_is_chosen_fits_by_our_plan_and_a_little_more_memory_never_means_less(
    run: tuple[Model, Ranks, Setup, int],
) -> None:
    model, ranks, setup, gib = run
    facts = facts_of(model, ranks, setup, gib * GIB)
    units = units_that_fit(facts)
    assert units <= units_that_fit(facts_of(model, ranks, setup, (gib + 8) * GIB))
    assume(units > 0)
    live = 2 * 2 * 10**9 if setup.stage == 3 else 0  # gathered layers count as activations
    assert peak_at(model, ranks, setup, 1.0 - units / UNITS) <= gib * GIB + live


@pytest.mark.parametrize("short", ["later", "reserve_fraction"])
def test_nothing_steps_on_an_accelerator_that_has_no_room(short: str) -> None:
    model = Model(GB, typical_largest(GB), "bfloat16")
    facts = facts_of(model, Ranks(1, 1), Setup(stage=2, zenflow=ZenFlowConfig()), 24 * GIB)
    assert units_that_fit(facts) > 0
    assert units_that_fit(replace(facts, **{short: 40 * GIB if short == "later" else 0.99})) == 0
