"""The bytes of a plan: what holds for every run. That they are a run's, `test_measured` shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.plan import MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Model, Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.held import Held, Memory, Phase
from deepspeed_ext.zenflow.plan.places import Copies, Place
from tests.support.memory_plans import DTYPES, PARAMS, planned, setups

PAGE = 4096


def partitions_of(plan: MemoryPlan) -> int:
    return sum(run.times for run in plan.setup.partitions(plan.model, plan.machine))


@given(setup=setups(), dtype=DTYPES, params=PARAMS, ranks=st.integers(1, 64))
def test_bytes_are_whole_and_parts_add_up(
    setup: Setup, dtype: str, params: int, ranks: int
) -> None:
    plan = planned(setup, params, ranks, dtype)
    for (place, phase), parts in plan.parts.items():
        assert all(type(part.nbytes) is int and part.nbytes > 0 for part in parts)
        assert all(part.memory.place is place for part in parts)
        names = {(part.kind, part.memory) for part in parts}
        assert len(names) == len(parts), "a kind is listed once"
        assert sum(part.nbytes for part in parts) == plan.nbytes(place, phase)
        assert plan.nbytes(place, phase) <= plan.peak(place)
        if phase.keeps:
            assert plan.nbytes(place, phase) >= plan.nbytes(place, Phase.BETWEEN)
    assert all(plan.others[phase] <= plan.nbytes(Place.HOST, phase) for phase in Phase)
    assert all(plan.page_locked(phase) <= plan.nbytes(Place.HOST, phase) for phase in Phase)


@given(
    setup=setups(),
    dtype=DTYPES,
    params=PARAMS,
    more=st.integers(1, 10**9),
    ranks=st.integers(1, 16),
)
def test_more_parameters_never_take_less(
    setup: Setup, dtype: str, params: int, more: int, ranks: int
) -> None:
    """Except for the positions of arrays within pages, and places of chunks."""
    few = planned(setup, params, ranks, dtype)
    many = planned(setup, params + more, ranks, dtype)
    for phase in (Phase.START, Phase.BETWEEN, Phase.BACKWARD, Phase.SAVE):
        assert few.nbytes(Place.ACCELERATOR, phase) <= many.nbytes(Place.ACCELERATOR, phase)
    pages = 32 * partitions_of(many) * PAGE
    for phase in Phase:
        assert few.nbytes(Place.HOST, phase) <= many.nbytes(Place.HOST, phase) + pages


@given(setup=setups(), dtype=DTYPES, params=st.integers(1, 10**9), ranks=st.integers(1, 8))
def test_bytes_of_the_arena_are_the_pages_of_its_layout(
    setup: Setup, dtype: str, params: int, ranks: int
) -> None:
    """The layout is the one that a start maps; see `test_built`."""
    assume(setup.zenflow is not None)
    plan = planned(setup, params, ranks, dtype).zenflow
    assert plan is not None
    assume(all(each.times == 1 for each in plan.partitions) and len(plan.partitions) <= 32)
    held = sum(part.nbytes for part in Held(plan).held(Place.HOST) if "arena" in part.memory.value)
    shown = set(plan.rule.layout.shown) - set(plan.rule.layout.kinds)
    pages = plan.layout.page_bytes()
    assert held == sum(size for key, size in pages.items() if key.kind not in shown)


@pytest.mark.parametrize(("stage", "gathers"), [(2, False), (3, True), (3, False)])
@pytest.mark.parametrize("ours", [True, False])
def test_the_first_rank_copies_the_module_that_it_exports(
    stage: Any, gathers: bool, ours: bool
) -> None:
    """At stage 2 ours passes through a chunk."""
    copies = int(gathers if stage == 3 else not ours)
    zenflow = ZenFlowConfig(update_interval=1) if ours else None
    setup = Setup(stage, zenflow=zenflow, offload=not ours, gathers_on_save=gathers, pins=True)
    plan = planned(setup, 10**9, 8)
    more = plan.nbytes(Place.HOST, Phase.SAVE) - plan.others[Phase.SAVE]
    assert more == pytest.approx(copies * 2 * 10**9, rel=0.04, abs=2**26)


def test_the_bytes_of_one_run_are_what_is_reckoned_by_hand() -> None:
    """Stage 2, bf16, two ranks, 1,000 parameters of which 100 are the largest; buckets of 300."""
    setup = Setup(stage=2, reduce_bucket_size=300, overlap_comm=True)
    plan = plan_memory(Model(1000, 100, "bfloat16"), Machine(2, 2), setup)
    weights, masters, moments, gradients = 2 * 1000, 4 * 500, 2 * 4 * 500, 2 * 500
    between = weights + masters + moments
    there = Place.ACCELERATOR
    assert plan.nbytes(there, Phase.BETWEEN) == between
    buckets, being_made, copy = 2 * 2 * 300, 2 * 100, 2 * 300
    backward = between + gradients + buckets + being_made + copy
    assert plan.nbytes(there, Phase.BACKWARD) == backward
    flat = 4 * 500
    assert plan.nbytes(there, Phase.STEP) == between + gradients + gradients + flat
    assert plan.nbytes(Place.HOST, Phase.SAVE) == weights, "the first rank's copy of the module"
    assert plan.others[Phase.SAVE] == 4 * 500, "the state, copied tensor by tensor"


SMALL = {
    "reduce_bucket_size": 300,
    "max_live_parameters": 100,
    "max_reuse_distance": 0,
    "prefetch_bucket_size": 0,
}
"""Of a bf16 model of 1,000 parameters, the largest of which has 100 elements, on two ranks."""
OFFLOAD = {"offload": True, "pins": True, "rounds_pinned": False}
HALF, MASTERS = 500, 4 * 500 + 2 * 4 * 500
"""This rank's elements, and the bytes of its masters and moments."""
BY_HAND: list[tuple[dict[str, Any], tuple[Place, Phase], dict[str, int]]] = [
    (  # stage 1 keeps each gradient in fp32; those of a bucket give way to its sum in bf16
        {"stage": 1, "sums": "fp32", "accumulation": 2},
        (Place.ACCELERATOR, Phase.BACKWARD),
        {
            "weights": 2 * 1000,
            "optimizer": MASTERS,
            "gradients": 4 * 1000,
            "buffers": 4 * 300 + 4 * HALF + 2 * 300,
        },
    ),
    (  # as large as this rank's part
        {"stage": 1},
        (Place.ACCELERATOR, Phase.BACKWARD),
        {
            "weights": 2 * 1000,
            "optimizer": MASTERS,
            "gradients": 2 * 1000,
            "buffers": 2 * 300 + 2 * HALF - 2 * 300,
        },
    ),
    (  # stage 2 converts the reduced bucket, and the largest gradient, which is being made
        {"stage": 2, "sums": "fp32"},
        (Place.ACCELERATOR, Phase.BACKWARD),
        {
            "weights": 2 * 1000,
            "optimizer": MASTERS,
            "gradients": 4 * HALF,
            "buffers": 2 * 300 + 2 * 100 + 2 * 300 + 4 * 100,
        },
    ),
    (  # stage 3: live parameters, a gradient being made, a copied bucket, and its part in fp32
        {"stage": 3, "sums": "fp32"},
        (Place.ACCELERATOR, Phase.BACKWARD),
        {
            "weights": 2 * HALF,
            "optimizer": MASTERS,
            "gradients": 4 * HALF,
            "buffers": 2 * 300 + 2 * 100 + 2 * 100 + 2 * 300 + 4 * 150,
        },
    ),
    (  # with offload, each half of the largest gradient, and the same in fp64 for the norm
        {"stage": 3, **OFFLOAD},
        (Place.ACCELERATOR, Phase.BACKWARD),
        {"weights": 2 * HALF, "buffers": 2 * 300 + 4 * 100 + 2 * 300 + (8 + 2) * 50},
    ),
    (
        {"stage": 3},
        (Place.ACCELERATOR, Phase.BETWEEN),
        {"weights": 2 * HALF, "optimizer": MASTERS, "gradients": 2 * HALF, "buffers": 2 * 300},
    ),
    (  # weights on the way to their masters on the host are converted, unless they are there, too
        {"stage": 3, **OFFLOAD},
        (Place.ACCELERATOR, Phase.START),
        {"weights": 2 * HALF, "buffers": 4 * HALF},
    ),
    (
        {"stage": 3, "offload_param": True, **OFFLOAD},
        (Place.ACCELERATOR, Phase.START),
        {"buffers": 2 * 300 + 2 * 100},
    ),
    (  # sums in fp32 are handed over as they are
        {"stage": 2, "sums": "fp32"},
        (Place.ACCELERATOR, Phase.STEP),
        {"weights": 2 * 1000, "optimizer": MASTERS, "gradients": 4 * HALF},
    ),
    (  # torch's Adam in place of a fused one has temporaries
        {"stage": 3, "fused_adam": False},
        (Place.ACCELERATOR, Phase.STEP),
        {
            "weights": 2 * HALF,
            "optimizer": MASTERS,
            "gradients": (2 + 4) * HALF,
            "buffers": 2 * 300 + 4 * HALF,
        },
    ),
    (  # a layer, and this rank's part of it if that comes from the host
        {"stage": 3, "offload_param": True, "gathers_on_save": True, **OFFLOAD},
        (Place.ACCELERATOR, Phase.SAVE),
        {"buffers": 2 * 300 + 2 * (100 + 50)},
    ),
    (
        {"stage": 3, "gathers_on_save": True, **OFFLOAD},
        (Place.ACCELERATOR, Phase.SAVE),
        {"weights": 2 * HALF, "buffers": 2 * 300 + 2 * 100},
    ),
    (  # this rank's slice, and two chunks of no more than its size
        {"stage": 2, "flatten_tier": "host"},
        (Place.HOST, Phase.START),
        {"buffers": 2 * HALF, "staging": 2 * 2 * HALF},
    ),
    ({"stage": 3}, (Place.HOST, Phase.START), {"buffers": 2 * HALF}),
]


@pytest.mark.parametrize(("given", "where", "expected"), BY_HAND)
def test_the_bytes_of_deepspeed_are_what_is_reckoned_by_hand(
    given: dict[str, Any], where: tuple[Place, Phase], expected: dict[str, int]
) -> None:
    plan = plan_memory(Model(1000, 100, "bfloat16"), Machine(2, 2), Setup(**SMALL, **given))
    assert {part.kind: part.nbytes for part in plan.parts[where]} == expected


@pytest.mark.parametrize("pins", [True, False])
def test_pin_memory_locks_what_crosses_the_link_and_not_the_moments(pins: bool) -> None:
    setup = Setup(2, offload=True, pins=pins, rounds_pinned=False, accumulation=2, **SMALL)
    plan = plan_memory(Model(1000, 100, "bfloat16"), Machine(2, 2), setup)
    crossing = 2 * 4 * 500 + 2 * 2 * 500 + 2 * 100  # masters, gradients; copy, sums; buffer
    assert plan.page_locked(Phase.BETWEEN) == (crossing if pins else 0)
    assert plan.nbytes(Place.HOST, Phase.BETWEEN) == crossing + 2 * 4 * 500


@pytest.mark.parametrize(("rounds", "params"), [(False, 1000), (True, 1000), (True, 1024)])
def test_weights_on_the_host_are_page_locked_whatever_the_config_says(
    rounds: bool, params: int
) -> None:
    """By torch, in powers of two."""
    setup = Setup(3, offload=True, offload_param=True, rounds_pinned=rounds, **SMALL)
    plan = plan_memory(Model(params, 100, "bfloat16"), Machine(2, 2), setup)
    assert plan.page_locked(Phase.BETWEEN) == (1024 if rounds else 1000)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bytes_of_zenflow_are_what_is_reckoned_by_hand(stage: Any) -> None:
    """bf16, four ranks, a million elements in each partition, copies beside the next step."""
    setup = Setup(stage, zenflow=ZenFlowConfig())
    plan = planned(setup, 4 * 2**20, 4).zenflow
    assert plan is not None
    assert plan.copies is Copies.BESIDE_STEP
    numel, blocks = 2**20, 2**20 // 32
    there = {part.kind: part.nbytes for part in Held(plan).parts(Place.ACCELERATOR, Phase.BETWEEN)}
    assert there == {"landing buffers": 2 * numel + 4 * blocks, "derived denominators": 4 * blocks}
    here = {part.kind: part for part in Held(plan).parts(Place.HOST, Phase.BETWEEN)}
    for kind in ("master", "moment m", "moment v"):
        assert here[kind].nbytes == pytest.approx(4 * numel, abs=2 * PAGE)
    assert here["master"].memory is Memory.ARENA
    assert here["block means"].memory is Memory.LOCKED_ARENA
    (staging,) = (
        part for part in Held(plan).parts(Place.HOST, Phase.START) if part.kind == "staging"
    )
    assert staging.nbytes == 2 * 2 * numel, "two chunks, each as large as all weights"
    on_host = Setup(3, zenflow=ZenFlowConfig(gradients_on_host=True))
    held = Held(planned(on_host, 4 * 2**20, 4).zenflow).moments(Place.HOST)[Phase.STEP]["step"]
    assert not sum(part.nbytes for part in held if part.kind == "temporaries"), "the worker's"


def test_a_save_beside_training_has_its_own_copy_of_what_is_not_in_the_arena() -> None:
    """The mean of the interval's gradients, and the numbers of the blocks that are hot, a tenth."""
    setup = Setup(
        2, zenflow=ZenFlowConfig(update_rule="selective", topk_ratio=0.1, async_save=True)
    )
    held = planned(setup, 2**20, 1).zenflow
    assert held is not None
    (copy,) = (
        part
        for part in Held(held).moments(Place.HOST)[Phase.SAVE]["module"]
        if part.kind == "copy of the rule's state"
    )
    blocks = 2**20 // 32
    assert copy.nbytes == 2 * 2**20 + 8 * -(-blocks // 10)
