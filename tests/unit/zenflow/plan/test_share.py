"""The share that hides a step and fits, and what a plan and its arena become with it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.arrays import PAGE_BYTES, ArrayKey, plan_layout
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.search import TYPICAL, expected_times, ways_on
from deepspeed_ext.zenflow.plan.share import (
    HIDDEN,
    MEASURED_STEPS,
    UNITS,
    ChainTimes,
    fitting_units,
    hiding_units,
    is_worth_it,
    relaid,
    with_host_share,
)
from tests.support.planned import decided

GIB = 1 << 30
RATIO = "offload_optimizer.ratio"
many = settings(deadline=None, derandomize=True, database=None)
numbers = st.lists(st.integers(0, 1_000_000), min_size=1, max_size=3)
shares = st.floats(0.0, 1.0)


def plan_of(
    *numels: int,
    share: float | None = 1.0,
    host: int | None = None,
    **config: Any,
) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True)
    limits = () if host is None else (("machine", host),)
    rank = RankFacts(tuple(Run(numel) for numel in numels), 80 * GIB, 80 * GIB, host_free=limits)
    return decided(ZenFlowFacts((rank,), caller), config, host_share=share)


def test_a_new_share_replaces_its_reason_and_no_other() -> None:
    plan = plan_of(GIB, update_rule="exact")
    moved = with_host_share(with_host_share(plan, 0.5, "first"), 0.25, "second")
    named = [each for each in moved.reasons if each.about == "share"]
    assert [each.why for each in named] == ["second"]
    kept = [each for each in plan.reasons if each.about != "share"]
    assert [each for each in moved.reasons if each not in named] == kept


@pytest.mark.parametrize(
    ("times", "share"),
    [
        (ChainTimes(device=1.0, worker=0.5), 1.0),
        (ChainTimes(device=1.0, worker=0.95), 1.0),
        (ChainTimes(device=1.0, worker=1.9), 0.5),
        (ChainTimes(device=1.0, worker=1.7, fixed=0.1), 0.5),
        (ChainTimes(device=1.0, worker=0.5, link=3.8), 0.25),
        # a pass gives itself time: w s = 0.95 (d + c w s), and the link l s the same
        (ChainTimes(device=1.0, worker=3.8, contention=0.5), 0.25 / (1.0 - 0.95 * 0.5)),
        (ChainTimes(device=1.0, worker=2.0, link=3.8, contention=0.5), 0.95 / (3.8 - 0.95)),
        (ChainTimes(device=1.0, worker=1.0, fixed=2.0), 0.0),
        (ChainTimes(device=0.0, worker=0.0), 1.0),
    ],
)
def test_the_host_keeps_what_the_accelerators_time_hides(times: ChainTimes, share: float) -> None:
    assert hiding_units(plan_of(GIB), times) / UNITS == pytest.approx(share, abs=1 / UNITS)
    for config in ({"hide_transfers": False}, {"overlap_step": False}):
        assert hiding_units(plan_of(GIB, **config), times) == 0


@many
@given(st.integers(1, 5_000_000), st.integers(0, 5_000_000), st.integers(0, 80_000_000))
def test_what_fits_is_as_much_as_there_is_room_for(first: int, second: int, room: int) -> None:
    plan = plan_of(first, second)
    units = fitting_units(plan, room)
    taken = plan.held.landing_bytes + room

    def bytes_at(units: int) -> int:
        moved = with_host_share(plan, units / UNITS, "")
        return moved.held.share_bytes + moved.held.landing_bytes

    assert units == UNITS or bytes_at(units) <= taken
    assert units == 0 or bytes_at(units - 1) > taken


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        ({}, [Copies.BESIDE_STEP, Copies.INSIDE_STEP]),
        ({"hide_transfers": False}, [Copies.INSIDE_STEP]),
        ({"overlap_step": False}, [Copies.BESIDE_STEP]),
    ],
)
def test_copies_beside_the_step_may_give_way_where_steps_overlap(
    config: dict[str, Any], ways: list[Copies]
) -> None:
    assert [plan.copies for plan in ways_on(plan_of(GIB, **config))] == ways


def test_before_anything_is_measured_times_are_those_of_bytes() -> None:
    """Of each element, 2.125 bytes go up, and the pass moves 24 of p and the moments and what the
    link does; a step is just long enough for the slower one."""
    plans = [plan_of(GIB, hide_transfers=hides) for hides in (True, False)]
    beside, inside = expected_times(plans)
    link, host = 2.125 * GIB / TYPICAL.link, (2 + 24 + 2.125 + 4.125) * GIB / TYPICAL.host
    assert (beside.worker, beside.link) == pytest.approx((host, link))
    assert (inside.worker, inside.link) == pytest.approx((host, link))
    assert beside.device == inside.device == pytest.approx(host / HIDDEN)


def test_without_room_nothing_moves() -> None:
    plan = plan_of(GIB)
    assert fitting_units(plan, 0) == fitting_units(plan, -GIB) == UNITS
    assert fitting_units(plan, 80 * GIB) == 0
    assert not is_worth_it(plan, 0.99)
    assert is_worth_it(plan, 0.9)


plans = st.sampled_from(
    [
        {},
        {"hide_transfers": False},
        {"state_dtype": "int8"},
    ]
)


@many
@given(numbers, shares, plans)
def test_a_moved_plan_is_the_one_of_a_run_that_began_with_it(
    numels: list[int], share: float, config: dict[str, Any]
) -> None:
    """But for the chunks, which keep their size."""
    moved = with_host_share(plan_of(*numels, **config), share, "")
    begun = plan_of(*numels, share=share, **config)
    assert [each.head for each in moved.partitions] == [each.head for each in begun.partitions]
    assert moved.held.share_bytes == begun.held.share_bytes
    assert moved.held.landing_bytes == begun.held.landing_bytes
    assert moved.kernels == begun.kernels
    assert not moved.measures_share


@many
@given(numbers, shares, plans)
def test_arrays_keep_their_place_and_what_moves_lies_before_them(
    numels: list[int], share: float, config: dict[str, Any]
) -> None:
    plan = plan_of(*numels, **config)
    before = plan_layout(plan.arena)
    moved = with_host_share(plan, share, "")
    after = relaid(before, moved)
    assert after.nbytes == before.nbytes
    assert {each.spec.key for each in after.arrays} == {each.spec.key for each in before.arrays}
    at = before.by_key()
    for spec, offset in after.arrays:
        was, place = at[spec.key]
        assert place <= offset - spec.before_bytes or not spec.before
        assert offset + spec.nbytes <= place + was.nbytes
    layout = plan.rule.layout
    for kind in {*layout.kept, *layout.shown}:
        for index, each in enumerate(moved.partitions):
            spec, offset = after.by_key()[ArrayKey(kind, index)]
            _, place = at[ArrayKey(kind, index)]
            per = plan.rule.block_size if kind in layout.scales else 1
            assert offset == place + spec.before_bytes
            assert (spec.before, spec.numel) == (each.head // per, -(-each.on_host // per))
    arrays = sorted((offset, spec.nbytes) for spec, offset in after.arrays if spec.numel)
    pages = [(begin // PAGE_BYTES, -(-(begin + size) // PAGE_BYTES)) for begin, size in arrays]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(pages))


# -- when it is left open -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "measures"),
    [
        (plan_of(GIB, share=None), True),
        (plan_of(GIB, share=None, overlap_step=False), True),
        (plan_of(GIB, share=0.5), False),
        (plan_of(GIB, share=None, topk_ratio=0.1), False),
        (plan_of(GIB, share=None, host=10 * GIB), False),
        (plan_of(GIB, share=None, host=20 * GIB), True),
    ],
)
def test_an_open_share_is_measured_if_the_host_is_large(plan: ZenFlowPlan, measures: bool) -> None:
    assert plan.measures_share is measures
    assert plan.host_share == 1.0 or not measures
    if measures:
        assert any(each.is_open for each in plan.reasons)


@pytest.mark.parametrize(
    ("config", "rounds"),
    [
        ({}, None),
        ({"full_warm_up_rounds": 2}, MEASURED_STEPS + 2),
        ({"full_warm_up_rounds": 50}, 50),
    ],
)
def test_a_run_that_measures_waits_often_enough(config: dict[str, int], rounds: int | None) -> None:
    rule = plan_of(GIB, share=None, **config).rule
    assert isinstance(rule, PredictiveSettings)
    assert rule.warm_up_steps == rounds
