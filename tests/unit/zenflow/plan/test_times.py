"""The share that hides a step and fits, and what a plan and its arena become with it; what limits a
measured step; what a step waits, against a model that walks through every chunk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.arrays import PAGE_BYTES, ArrayKey, plan_layout
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import MOST_CHUNKS, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.times import (
    UNITS,
    ChainTimes,
    Lanes,
    Limit,
    MeasuredStep,
    accelerator_bytes,
    best_threads,
    chosen_share,
    hiding_units,
    lanes_of,
    least_units,
    limit_line,
    probed_threads,
    thread_counts,
    times_of,
    traffic_of,
    with_host_share,
)
from tests.support.planned import decided
from tests.support.schedules import Machine, exact

GIB = 1 << 30
many = settings(deadline=None, derandomize=True, database=None)
numbers = st.lists(st.integers(0, 1_000_000), min_size=1, max_size=3)
shares = st.floats(0.0, 1.0)


def plan_of(
    *numels: int, share: float | None = 1.0, host: int | None = None, **config: Any
) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True)
    limits = () if host is None else (("machine", host),)
    rank = RankFacts(tuple(Run(numel) for numel in numels), 80 * GIB, 80 * GIB, host_free=limits)
    return decided(ZenFlowFacts((rank,), caller), config, ratio="auto" if share is None else share)


@pytest.mark.parametrize(
    ("times", "share"),
    [
        (ChainTimes(device=1.0, worker=0.5), 1.0),
        (ChainTimes(device=1.0, worker=0.95), 1.0),
        (ChainTimes(device=1.0, worker=1.9), 0.5),
        (ChainTimes(device=1.0, worker=0.5, link=3.8), 0.25),
        # a pass gives itself time: w s = 0.95 (d + c w s), and the link l s the same
        (ChainTimes(device=1.0, worker=3.8, contention=0.5), 0.25 / (1.0 - 0.95 * 0.5)),
        (ChainTimes(device=1.0, worker=2.0, link=3.8, contention=0.5), 0.95 / (3.8 - 0.95)),
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
    units = least_units(plan, room)
    taken = accelerator_bytes(plan) + room

    def bytes_at(units: int) -> int:
        return accelerator_bytes(with_host_share(plan, units / UNITS, ""))

    assert units == UNITS or bytes_at(units) <= taken
    assert units == 0 or bytes_at(units - 1) > taken


SYNCHRONOUS, INSIDE = {"overlap_step": False}, {"hide_transfers": False}


@pytest.mark.parametrize(
    ("config", "worker", "seconds"),
    [
        ({}, 0.5, 1.0),
        ({}, 2.0, 2.0),
        (INSIDE, 0.5, 1.0 + 0.75),
        (INSIDE, 2.0, 2.0 + 0.75),
        (SYNCHRONOUS, 0.5, 1.0 + 0.75),
        (SYNCHRONOUS, 2.0, 1.0 + 2.0),
        (SYNCHRONOUS | INSIDE, 2.0, 1.0 + 0.75 + 2.0),
    ],
)
def test_what_a_step_takes(config: dict[str, Any], worker: float, seconds: float) -> None:
    plan = plan_of(GIB, **config)
    assert ChainTimes(1.0, worker, link=0.75, there=8.0).step(plan, 1.0) == seconds
    half = ChainTimes(1.0, 2 * worker, link=1.5, there=8.0).step(plan, 0.5)
    assert half == seconds + 4.0


# -- the choice, from what was measured ------------------------------------------------------------


def choice(plan: ZenFlowPlan, *times: ChainTimes, room: int = 80 * GIB) -> float:
    share, _ = chosen_share(plan, [(each, least_units(plan, room)) for each in times])
    return share


@pytest.mark.parametrize(
    ("times", "room", "share"),
    [
        pytest.param([ChainTimes(1.0, 0.5)], GIB, 1.0, id="the worker keeps up"),
        pytest.param([ChainTimes(1.0, 1.9)], 80 * GIB, 0.5, id="what hides"),
        pytest.param(
            [ChainTimes(1.0, 0.5), ChainTimes(1.0, 1.9)], 80 * GIB, 0.5, id="a rank is slower"
        ),
        pytest.param([ChainTimes(1.0, 3.8)], 3 * GIB, 0.7, id="what fits"),
        pytest.param([ChainTimes(1.0, 3.8)], 0, 1.0, id="nothing fits"),
        pytest.param([ChainTimes(1.0, 1.0)], 80 * GIB, 0.95, id="a small part"),
        pytest.param([ChainTimes(1.0, 0.97)], 80 * GIB, 1.0, id="too little to move"),
        pytest.param([ChainTimes(1.0, 1.9, there=2.0)], 80 * GIB, 1.0, id="nothing is gained"),
        pytest.param(
            [ChainTimes(1.0, 0.9, contention=0.1, there=0.09)], 80 * GIB, 1.0, id="it costs as much"
        ),
        pytest.param(
            [ChainTimes(1.0, 0.9, contention=0.2, there=0.05)], 80 * GIB, 0.0, id="a pass delays"
        ),
        pytest.param([ChainTimes(1.0, 3.8), ChainTimes(0.0, 0.0)], GIB, 1.0, id="not measured"),
        pytest.param([ChainTimes(1.0, float("nan"))], 80 * GIB, 1.0, id="no number"),
    ],
)
def test_the_share_that_is_chosen(times: list[ChainTimes], room: int, share: float) -> None:
    assert choice(plan_of(GIB), *times, room=room) == pytest.approx(share, abs=0.01)


def test_the_reason_of_a_share_names_what_was_measured() -> None:
    plan = plan_of(GIB)
    _, why = chosen_share(plan, [(ChainTimes(1.0, 3.8, link=0.5), least_units(plan, 3 * GIB))])
    assert "takes 3800.0 ms, copies 500.0 ms, the accelerator 1000.0 ms between" in why
    assert "room for 30." in why


def test_without_overlap_as_much_moves_as_fits() -> None:
    plan = plan_of(GIB, overlap_step=False)
    assert choice(plan, ChainTimes(1.0, 0.5, 0.1)) == 0.0
    assert choice(plan, ChainTimes(1.0, 0.5, 0.1), room=0) == 1.0


def test_the_share_of_an_h200_is_the_published_one() -> None:
    """At 8,192 tokens. With all of the optimizer on it a step took 281 ms, with the share that
    hides 311. Most of the time in a step is launches of DeepSpeed's own."""
    plan = plan_of(GIB)
    alone = MeasuredStep(0.2612, 0.0, 0.3378, 0.3378, link=0.1115)
    beside = MeasuredStep(0.2955, 0.022, 0.0103, 0.3378, link=0.1115, gather=0.0007, estimate=0.004)
    times = times_of(plan, alone, beside)
    assert times.there == pytest.approx(28 / 6 * beside.estimate)
    assert (times.device, times.worker) == (0.2612, 0.3378)
    assert times.link == pytest.approx(0.0574, rel=1e-2)
    assert times.contention == pytest.approx((0.2955 - 0.2612) / 0.2955)
    assert choice(plan, times) == 0.0
    without = times_of(plan, None, beside)
    assert (without.device, without.contention) == (0.2955, 0.0)
    assert choice(plan, without) == pytest.approx(0.95 * 0.2955 / 0.3378, abs=1 / UNITS)
    assert not times_of(plan, None, None).is_complete


def test_a_pass_over_a_part_is_scaled_to_all_and_copies_inside_are_what_is_waited_for() -> None:
    half = with_host_share(plan_of(GIB), 0.5, "")
    times = times_of(half, MeasuredStep(1.0, 0.5, 0.45, 0.3, link=0.2), None)
    assert (times.worker, times.link) == pytest.approx((0.6, 2 * 0.2 * 2.125 / 4.125))
    inside = plan_of(GIB, hide_transfers=False)
    times = times_of(inside, None, MeasuredStep(1.0, 0.3, 0.2, 0.4))
    assert times.link == pytest.approx(0.2 * 2.125 / 4.125)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "seconds", "best"),
    [
        ((16, 12, 8), [2.0, 2.0, 1.0, 1.0, 3.0, 3.0], 12),
        ((16, 12, 8), [2.0, 2.0, 1.97, 1.97, 1.96, 1.96], 16),
        ((16, 12, 8), [2.0, 9.0, 3.0, 3.0, 1.0, 1.0], 8),
        ((16, 12, 8), [2.0, 2.0, 1.0, 1.0, 1.0], 16),
        ((16, 12, 8), [], 16),
        ((4,), [1.0] * 6, 4),
    ],
)
def test_the_best_thread_count_is_clearly_faster_or_the_first(
    counts: tuple[int, ...], seconds: list[float], best: int
) -> None:
    assert best_threads(counts, seconds) == best


def test_at_most_three_thread_counts_are_tried() -> None:
    found = [thread_counts(most) for most in (16, 3, 2, 1)]
    assert found == [(16, 12, 8), (3, 2, 1), (2, 1), (1,)]
    assert probed_threads((16, 12, 8)) == [16, 16, 12, 12, 8, 8]
    assert probed_threads((2, 1)) == [2, 2, 2, 1, 1, 1]


# -- the arena of a plan that moved ----------------------------------------------------------------


plans = st.sampled_from([{}, {"hide_transfers": False}, {"state_dtype": "int8"}])


@many
@given(numbers, shares, plans)
def test_a_moved_plan_is_the_one_of_a_run_that_began_with_it(
    numels: list[int], share: float, config: dict[str, Any]
) -> None:
    moved = with_host_share(plan_of(*numels, **config), share, "")
    begun = plan_of(*numels, share=share, **config)
    assert [each.head for each in moved.partitions] == [each.head for each in begun.partitions]
    assert moved.head_bytes == begun.head_bytes
    assert moved.landing_bytes == begun.landing_bytes
    assert not moved.measures_share


@many
@given(numbers, shares, plans)
def test_arrays_keep_their_place_and_what_moves_lies_before_them(
    numels: list[int], share: float, config: dict[str, Any]
) -> None:
    plan = plan_of(*numels, **config)
    before = plan_layout(plan.arena)
    moved = with_host_share(plan, share, "")
    after = before.relaid(moved.arena)
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


# -- when it is left open --------------------------------------------------------------------------


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


# -- what limits a step ----------------------------------------------------------------------------


Step = MeasuredStep


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        (Step(1.00, 0.04, 0.03, 1.00), Limit.NOTHING),
        (Step(1.00, 0.30, 0.28, 1.27), Limit.WORKER),
        (Step(1.00, 0.30, 0.28, 1.27, link=0.9), Limit.WORKER),
        (Step(1.00, 0.30, 0.28, 0.60, link=1.27), Limit.LINK),
        (Step(1.00, 0.30, 0.28, 0.60), Limit.LINK),
        (Step(1.00, 0.30, 0.10, 1.00, gather=0.18), Limit.GATHER),
        (Step(1.00, 0.30, 0.10, 1.00, gather=0.02), Limit.STEP),
        (Step(1.00, 0.30, 0.29, 1.20), Limit.WORKER),
        (Step(1.00, 0.30, 0.29, 1.10), Limit.LINK),
    ],
)
def test_the_largest_part_of_the_step_limits_it(measured: MeasuredStep, limit: Limit) -> None:
    assert measured.limit is limit


def test_copies_that_stay_inside_the_step_are_what_the_pass_does_not_explain() -> None:
    assert Step(1.0, 0.32, 0.30, 1.22).exposed_copies == pytest.approx(0.1)
    assert Step(1.0, 0.32, 0.30, 1.22, link=0.5).exposed_copies == 0.0


@pytest.mark.parametrize(
    ("measured", "cores", "line"),
    [
        (Step(2.0, 0.04, 0.0, 0.5), (14, 16), "1.02x its time without the optimizer; nothing"),
        (Step(1.0, 0.08, 0.08, 1.08), (14, 16), "the optimizer process limits it (14 of 16 cores)"),
        (Step(1.0, 0.08, 0.08, 1.08), None, "the optimizer process limits it: fewer pt_reserved"),
        (Step(1.0, 0.30, 0.28, 0.60), None, "1.30x its time without the optimizer; the link to"),
    ],
)
def test_a_line_says_what_limits(
    measured: MeasuredStep, cores: tuple[int, int] | None, line: str
) -> None:
    told = limit_line(measured, cores)
    assert told.startswith("ZenFlow: a step takes ")
    assert line in told
    assert "stage 3" not in told


def test_a_step_that_waits_for_weights_is_told_what_stage_3_would_hide() -> None:
    told = limit_line(Step(1.0, 0.30, 0.28, 1.22), streams=True)
    assert told.endswith("; at stage 3 the next forward would hide up to 80 ms of it")


# -- what a step waits -----------------------------------------------------------------------------

NUMEL = 1 << 31
PASSES, LINKS = (0.1, 0.2, 0.4, 0.8, 2.0), (0.05, 0.2, 0.5, 1.0)
FORWARDS = (0.1, 0.25, 1 / 3)
CHUNKS = 1 / MOST_CHUNKS


def streamed(**config: Any) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True, partitions_weights=True)
    rank = RankFacts((Run(NUMEL),), 80 * GIB, 80 * GIB)
    chosen = ZenFlowConfig(**config)
    return decide(ZenFlowFacts((rank,), caller), chosen, ratio=1.0)


def lanes(plan: ZenFlowPlan, link: float, worker: float) -> Lanes:
    """On a machine that copies in `link` seconds each way and passes in `worker`."""
    moves = traffic_of(plan)
    return lanes_of(plan, moves.down * NUMEL / link, moves.passed * NUMEL / worker)


def peek_of(plan: ZenFlowPlan, worker: float) -> float:
    moves = traffic_of(plan)
    return worker * moves.peeked / moves.passed


@pytest.mark.parametrize(
    ("rule", "leaves"), [("exact", True), ("exact", False), ("predictive", True)]
)
@pytest.mark.parametrize("forward", FORWARDS)
def test_weights_that_come_up_in_chunks_wait_as_long_as_a_walk_through_them_says(
    forward: float, rule: str, leaves: bool
) -> None:
    plan = streamed(update_rule=rule, gradients_on_host=leaves)
    assert plan.wait is Wait.FORWARD
    for link, worker in itertools.product(LINKS, PASSES):
        found, peek = lanes(plan, link, worker), peek_of(plan, worker)
        if plan.predicts_in_chunks:  # which reads the gradient and y, and writes weights
            peek = worker * 6 / traffic_of(plan).passed
        machine = Machine(forward, 1 - forward, link, worker, MOST_CHUNKS)
        every = plan.predicts_in_chunks
        walked = exact(machine, peek, arrives_in_backward=leaves, every=every)
        assert found.waits(forward, 1 - forward) == pytest.approx(walked, abs=0.03 * (1 + walked))


def test_a_peek_moves_16_bytes_and_fewer_with_smaller_moments() -> None:
    for state, moved in (("float32", 16), ("bfloat16", 12), ("int8", 10.06)):
        plan = streamed(update_rule="exact", state_dtype=state)
        assert traffic_of(plan).peeked == pytest.approx(moved, abs=0.01)


def test_only_estimates_need_block_means() -> None:
    ups = {rule: traffic_of(streamed(update_rule=rule)).up for rule in ("predictive", "exact")}
    assert ups == {"predictive": 2 + 4 / 32, "exact": 2}


def test_without_waits_only_the_first_chunk_is_exposed() -> None:
    plan = streamed(update_rule="exact", gradients_on_host=True)
    found = lanes(plan, 0.1, 0.2)
    first = (peek_of(plan, 0.2) + found.up) * CHUNKS
    assert found.waits(1 / 3, 2 / 3) == pytest.approx(first) == pytest.approx(found.exposed)
