"""The schedule: every gradient is handed over once, in order, and nothing is written while the
worker may read it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.zenflow.optimizers.lion import LionKind
from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.rule import slots_at
from deepspeed_ext.zenflow.rules import predictive
from deepspeed_ext.zenflow.rules.guard import PredictionErrors, Sample, blocks_per_sample, drawn
from deepspeed_ext.zenflow.rules.predictive import (
    CALM_PROBES,
    STRIKES,
    GuardState,
    PredictiveSchedule,
)
from deepspeed_ext.zenflow.worker.kernel.definition import decode
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionStep


def walk(schedule: PredictiveSchedule, steps: int) -> list:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


@pytest.mark.parametrize(
    ("source", "slots"), [(Source.COPY, 1), (Source.HOST, 2), (Source.BACKWARD, 2)]
)
def test_slots_of_gradients(source: Source, slots: int) -> None:
    assert slots_at(source) == slots
    assert PredictiveSchedule(True, None, False, source).ring == slots


@pytest.mark.parametrize(("warm_up", "synchronous"), [(None, 10), (0, 1), (1, 1), (30, 30)])
def test_the_first_steps_are_synchronous_and_then_one_step_late(
    warm_up: int | None, synchronous: int
) -> None:
    plans = walk(PredictiveSchedule(overlap=True, warm_up_steps=warm_up), 40)
    waits = [Wait.STEP] * synchronous + [Wait.NEXT_STEP] * (40 - synchronous)
    assert [plan.wait for plan in plans] == waits
    assert [plan.publish_ahead for plan in plans] == [k >= synchronous - 1 for k in range(40)]
    assert {plan.handed_over for plan in plans} == {1}


def test_without_overlap_every_step_is_exact() -> None:
    plans = walk(PredictiveSchedule(overlap=False, warm_up_steps=None), 30)
    assert {(p.wait, p.handed_over, p.publish_ahead) for p in plans} == {(Wait.STEP, 1, False)}


@given(cut=st.integers(0, 60), rest=st.integers(0, 40))
def test_a_restored_schedule_continues(cut: int, rest: int) -> None:
    straight = PredictiveSchedule(overlap=True, warm_up_steps=None)
    walk(straight, cut)
    restored = PredictiveSchedule(overlap=True, warm_up_steps=None)
    restored.load(straight.state)
    assert walk(restored, rest) == walk(straight, rest)


LENGTHS = st.floats(1e-6, 1e6)
EXCESSES = st.sampled_from([0.1, 0.9, 1.0, 1.1, math.inf, math.nan])
STEPS = st.tuples(
    st.just("steps"), st.tuples(st.integers(1, 40), st.lists(EXCESSES, min_size=1, max_size=9))
)
LOAD = st.tuples(
    st.just("load"),
    st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 9)), st.booleans()),
)


@given(
    warm_up=st.one_of(st.none(), st.integers(0, 9)),
    events=st.lists(st.one_of(STEPS, LOAD, st.just(("restart", None))), max_size=8),
)
@patch.object(predictive, "PROBE_EVERY", 2)
@patch.object(predictive, "CALM_PROBES", 2)
def test_no_step_overlaps_unless_the_worker_has_published_ahead(
    warm_up: int | None, events: list
) -> None:
    """Whatever was before: the guard trips and releases, p is replaced, or the run resumes with
    other settings."""
    schedule = PredictiveSchedule(True, warm_up, guarded=True)
    is_ahead, overlaps = False, True
    for event, value in [*events, ("steps", (60, [0.1]))]:
        if event == "restart":
            schedule.restart()
            is_ahead = False
        elif event == "load":
            saved = schedule.state
            overlaps, warm_up, guarded = value
            schedule = PredictiveSchedule(overlaps, warm_up, guarded)
            schedule.load(saved)
        else:
            steps, excesses = value
            for number in range(steps):
                if schedule.wants_verdict:
                    schedule.judge(excesses[number % len(excesses)])
                plan = schedule.plan()
                assert is_ahead or not plan.predicts
                assert overlaps or not plan.publish_ahead
                assert not (plan.predicts and schedule.state.guard.synchronous)
                schedule.advance(plan)
                assert schedule.state.guard.probed <= plan.probes
                is_ahead = plan.publish_ahead
    if overlaps:
        assert schedule.plan().predicts or schedule.state.guard.synchronous


@pytest.mark.parametrize(
    ("errors", "excess"),
    [
        # as far off as the weights before
        (PredictionErrors(prediction=1.0, rounding=0.1, update=1.0), 1.0),
        (PredictionErrors(prediction=0.5, rounding=0.1, update=1.0), 0.5),
        # a small lr: rounding is most of it
        (PredictionErrors(prediction=12.0, rounding=4.0, update=1.0), 1.0),
        (PredictionErrors(prediction=0.0, rounding=0.0, update=0.0), 0.0),  # nothing moves
        (PredictionErrors(prediction=1e-9, rounding=0.0, update=0.0), math.inf),
    ],
)
def test_an_error_is_seen_beside_rounding_and_update(
    errors: PredictionErrors, excess: float
) -> None:
    assert errors.excess(3.0) == pytest.approx(excess)


@given(LENGTHS, LENGTHS, LENGTHS, st.floats(1.0, 100.0), LENGTHS)
def test_an_excess_has_no_unit_and_shrinks_with_the_factor(
    prediction: float, rounding: float, update: float, factor: float, unit: float
) -> None:
    errors = PredictionErrors(prediction, rounding, update)
    scaled = PredictionErrors(prediction * unit, rounding * unit, update * unit)
    assert scaled.excess(factor) == pytest.approx(errors.excess(factor))
    assert errors.excess(factor) * factor == pytest.approx(errors.excess(1.0))
    assert PredictionErrors(prediction, rounding * 2, update * 2).excess(factor) <= errors.excess(
        factor
    )


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["prediction", "rounding", "update"])
def test_numbers_that_are_not_finite_are_too_large_an_error(name: str, number: float) -> None:
    errors = PredictionErrors(**{"prediction": 1.0, "rounding": 1.0, "update": 1.0, name: number})
    assert errors.excess(3.0) == math.inf
    assert "not finite" in errors.in_words(3.0)
    assert "not finite" in (errors + PredictionErrors(1.0, 1.0, 1.0)).in_words(3.0)


def test_the_words_tell_what_was_found() -> None:
    words = PredictionErrors(prediction=3.0, rounding=0.5, update=2.0).in_words(3.0)
    assert "1.5 of an update" in words
    assert "rounding alone is 0.25" in words
    assert "prediction_error_factor 3 allows 1" in words


@given(st.lists(EXCESSES, max_size=400))
def test_steps_become_synchronous_after_strikes_in_a_row_and_overlapped_after_calm(
    excesses: list[float],
) -> None:
    """Against a count of the newest probes that agree."""
    state, bad, calm, trips = GuardState(), 0, 0, 0
    for excess in excesses:
        before, state = state, state.judged(excess)
        bad = 0 if excess <= 1.0 else bad + 1
        calm = calm + 1 if excess < 0.75 else 0
        if before.synchronous:
            needed = CALM_PROBES * 2 ** (trips - 1)
            assert state.synchronous == (calm < needed)
            bad = 0
        else:
            assert state.synchronous == (bad == STRIKES)
            calm = 0
        trips += state.synchronous and not before.synchronous
        assert state.trips == trips
        assert not state.probed


def test_the_time_to_stay_synchronous_is_bounded() -> None:
    states = [GuardState(True, 10**9, CALM_PROBES * 2**6 - left).judged(0.0) for left in (2, 1)]
    assert [state.synchronous for state in states] == [True, False]


def test_probes_come_every_so_many_steps_and_at_once_after_a_strike() -> None:
    state, probes = GuardState(), []
    for number in range(50):
        probes += [number] * state.is_due
        state = state.handed_over(state.is_due)
    assert probes == [0, 20, 40]
    assert not state.judged(0.5).is_due
    assert state.judged(2.0).is_due
    assert GuardState(True, trips=1, steps_to_probe=7).judged(2.0).steps_to_probe == 7


def test_a_checkpoint_of_synchronous_steps_goes_on_without_a_guard() -> None:
    """With a step that waits and publishes for overlapped ones."""
    guarded = PredictiveSchedule(True, 2, guarded=True)
    for _ in range(20):
        if guarded.wants_verdict:
            guarded.judge(math.inf)
        guarded.advance(guarded.plan())
    assert guarded.state.guard.synchronous
    schedule = PredictiveSchedule(True, 2)
    schedule.load(guarded.state)
    sources = []
    for _ in range(2):
        plan = schedule.plan()
        sources.append(("predicted" if plan.predicts else "exact", plan.publish_ahead))
        schedule.advance(plan)
    assert sources == [("exact", True), ("predicted", True)]
    assert not schedule.state.guard.synchronous


@pytest.mark.parametrize(
    ("block_size", "partitions", "blocks"),
    [
        (32, 1, 256),
        (32, 4, 64),
        (256, 1, 32),
        (256, 4, 8),
        (256, 5, 8),
        (8, 0, 1024),
        (1 << 14, 1, 8),
    ],
)
def test_samples_of_all_partitions_have_8192_elements_but_at_least_8_blocks_each(
    block_size: int, partitions: int, blocks: int
) -> None:
    assert blocks_per_sample(block_size, partitions) == blocks


def test_a_verdict_tells_whether_it_changes_the_coming_steps_in_both_directions() -> None:
    schedule = PredictiveSchedule(overlap=True, warm_up_steps=1, guarded=True)
    while not schedule.wants_verdict:
        schedule.advance(schedule.plan())
    assert not schedule.is_settled
    for strike in range(1, STRIKES + 1):
        assert schedule.judge(2.0) is (strike == STRIKES)
    assert schedule.is_settled
    assert schedule.state.guard.synchronous
    for calm in range(1, CALM_PROBES + 1):
        assert schedule.judge(0.1) is (calm == CALM_PROBES)
    assert not schedule.state.guard.synchronous


BLOCK = 4


def sample_of(
    numel: int, most_blocks: int, seed: int = 1, index: int = 0
) -> tuple[Sample, torch.Tensor]:
    state = tuple(torch.arange(numel, dtype=torch.float32) + 1000 * number for number in range(3))
    partition: Any = SimpleNamespace(
        master=state[0], moments=state[1:], scales=(), state=state, index=index
    )
    partition.weights = lambda: torch.empty(0, dtype=torch.bfloat16)
    none: Any = None
    blocks, grad = drawn(partition, BLOCK, most_blocks, seed), torch.arange(numel).bfloat16()
    return Sample(partition, grad, none, BLOCK, none, none, blocks), state[0]


@pytest.mark.parametrize(
    ("numel", "most", "count"),
    [(0, 8, 0), (1, 8, 1), (3, 8, 1), (4, 8, 1), (11, 8, 2), (400, 8, 8), (402, 100, 100)],
)
def test_blocks_are_drawn_from_all_parts_of_the_partition(
    numel: int, most: int, count: int
) -> None:
    """Whole ones, or all of a partition that is shorter. Values are copied, because the worker
    changes the state and y replaces the gradient."""
    whole = max(1, numel // BLOCK)
    for seed in range(20):
        sample, _ = sample_of(numel, most, seed)
        blocks = sample.blocks.tolist()
        assert len(set(blocks)) == count
        for number, block in enumerate(blocks):
            last = min(whole - 1, (number + 1) * whole / count)
            assert int(number * whole / count) <= block <= last
        elements = [i for block in blocks for i in range(block * BLOCK, (block + 1) * BLOCK)]
        elements = [element for element in elements if element < numel]
        assert sample.state[0].tolist() == elements
        assert sample.state[2].tolist() == [2000.0 + element for element in elements]
        assert sample.newest.tolist() == torch.tensor(elements).bfloat16().tolist()


@pytest.mark.parametrize("numel", [3, 402])
def test_moments_that_are_codes_are_decoded(numel: int) -> None:
    numbers, blocks = torch.arange(numel), -(-numel // BLOCK)
    codes = (numbers % 100 - 50).to(torch.int8), (numbers % 200).to(torch.uint8)
    scales = tuple((100 + torch.arange(blocks) % 20).to(torch.uint8) for _ in codes)
    partition: Any = SimpleNamespace(master=numbers.float(), moments=codes, scales=scales, index=0)
    partition.weights = lambda: torch.empty(0, dtype=torch.bfloat16)
    none: Any = None
    sample = Sample(
        partition, numbers.bfloat16(), none, BLOCK, none, none, drawn(partition, BLOCK, 8, 1)
    )
    for moment, of_moment, found in zip(codes, scales, sample.state[1:], strict=True):
        whole = torch.empty(numel)
        decode(moment, of_moment, BLOCK, whole)
        assert torch.equal(found, sample.of(whole))


def test_seeds_and_partitions_draw_other_blocks() -> None:
    drawn = [
        tuple(sample_of(4000, 8, seed, index)[0].blocks.tolist())
        for seed in range(4)
        for index in range(4)
    ]
    assert len(set(drawn)) == len(drawn)
    assert drawn[0] == tuple(sample_of(4000, 8, 0, 0)[0].blocks.tolist())


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0.0), (torch.bfloat16, 0.25)])
def test_errors_are_distances_from_what_the_worker_has_computed(
    dtype: torch.dtype, rounding: float
) -> None:
    sample, master = sample_of(16, 8)
    master.fill_(128.25)  # bf16 has steps of 1 here
    sample.state[0].fill_(126.25)

    def predicted() -> torch.Tensor:
        return torch.full((16,), 129.0, dtype=dtype)

    sample.predicted = predicted  # type: ignore[method-assign]
    errors = sample.errors()
    assert errors.prediction == pytest.approx(4 * 0.75)
    assert errors.update == pytest.approx(4 * 2.0)
    assert errors.rounding == pytest.approx(max(4 * rounding, 4 * 128.25 * 2.0**-24))


def test_a_sample_of_lion_predicts_by_the_formula_of_its_estimate() -> None:
    generator = torch.Generator().manual_seed(1)
    p, m, grad = (torch.randn(2 * BLOCK, generator=generator) for _ in range(3))
    partition: Any = SimpleNamespace(master=p, moments=(m,), scales=(), ring=(), index=0)
    partition.weights = lambda: torch.empty(0)
    step = LionStep(lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.5, step=2, grad_scale=1.0)
    kind = LionKind(torch.optim.SGD([torch.zeros(1)]))
    sample = Sample(partition, grad, kind, BLOCK, step, step, drawn(partition, BLOCK, 8, 1))
    means = m.view(-1, BLOCK).abs().mean(1).repeat_interleave(BLOCK)
    direction = 0.9 * means.copysign(m) + (1.0 - 0.9) * grad
    torch.testing.assert_close(sample.predicted(), 0.75 * p - 0.5 * direction.sign())
