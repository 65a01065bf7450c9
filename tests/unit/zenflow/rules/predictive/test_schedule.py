"""The schedule: every gradient is handed over once, in order, and nothing is written while the
worker may read it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.predictive import ring_of
from deepspeed_ext.zenflow.rules.predictive.schedule import PredictiveSchedule, WeightSource
from deepspeed_ext.zenflow.step.schedule import MEASURED_STEPS, is_overloaded, smallest_interval


def walk(schedule: PredictiveSchedule, steps: int) -> list:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


@pytest.mark.parametrize(
    ("interval", "arrival", "slots"),
    [
        (1, Arrival.AFTER_Y, 1),
        (4, Arrival.AFTER_Y, 7),
        (1, Arrival.BEFORE_Y, 2),
        (4, Arrival.BEFORE_Y, 7),
        (1, Arrival.IN_BACKWARD, 2),
        (4, Arrival.IN_BACKWARD, 8),
    ],
)
def test_slots_of_the_ring(interval: int, arrival: Arrival, slots: int) -> None:
    assert ring_of(interval, arrival) == slots
    assert PredictiveSchedule(interval, True, None, False, arrival).ring == slots


@pytest.mark.parametrize("interval", [1, 4, 64])
def test_by_default_ten_steps_are_synchronous_or_forty_at_longer_intervals(interval: int) -> None:
    plans = walk(PredictiveSchedule(interval, overlap=True, warm_up_steps=None), 80)
    synchronous = 10 if interval == 1 else max(40, interval)
    assert [p.source is WeightSource.EXACT for p in plans] == [True] * synchronous + [False] * (
        80 - synchronous
    )


def test_interval_one_is_synchronous_once_and_then_one_step_late() -> None:
    plans = walk(PredictiveSchedule(1, overlap=True, warm_up_steps=1), 4)
    assert [p.source for p in plans] == [WeightSource.EXACT] + [WeightSource.PREDICTED] * 3
    assert [p.handed_over for p in plans] == [1] * 4
    assert all(p.publish_ahead for p in plans)


def test_without_overlap_every_step_is_exact() -> None:
    plans = walk(PredictiveSchedule(4, overlap=False, warm_up_steps=None), 30)
    assert {(p.source, p.handed_over, p.publish_ahead) for p in plans} == {
        (WeightSource.EXACT, 1, False)
    }


def test_interval_two_as_drawn_in_the_module() -> None:
    plans = walk(PredictiveSchedule(2, overlap=True, warm_up_steps=2), 6)
    assert [p.source.value for p in plans] == [
        "exact",
        "exact",
        "drifted",
        "predicted",
        "drifted",
        "predicted",
    ]
    assert [p.handed_over for p in plans] == [1, 1, 0, 2, 0, 2]
    assert [p.publish_ahead for p in plans] == [False, True, True, True, True, True]


@settings(deadline=None)
@given(
    interval=st.integers(1, 9),
    warm_up=st.one_of(st.none(), st.integers(0, 30)),
    steps=st.integers(0, 120),
)
def test_every_gradient_is_handed_over_once_and_kept_until_it_is_used(
    interval: int, warm_up: int | None, steps: int
) -> None:
    """Gradients are written after their step has waited for the worker."""
    schedule = PredictiveSchedule(interval, True, warm_up)
    assert schedule.ring == 2 * interval - 1
    collected: list[int] = []
    in_flight: list[int] = []
    handed_over = 0
    for number in range(steps):
        plan = schedule.plan()
        assert plan.position == len(collected)
        assert schedule.latest(len(collected)) == tuple(collected)
        if plan.waits_first:
            in_flight = []
        collected.append(schedule.coming)
        assert len({*collected, *in_flight}) == len(collected) + len(in_flight), (
            "a gradient is overwritten"
        )
        if plan.handed_over:
            assert plan.handed_over == len(collected)
            handed_over += len(collected)
            in_flight = [] if plan.source is WeightSource.EXACT else collected
            collected = []
        if number < schedule.warm_up_steps:
            assert plan.source is WeightSource.EXACT
        else:
            assert plan.source is (
                WeightSource.PREDICTED if plan.handed_over else WeightSource.DRIFTED
            )
        schedule.advance(plan)
    assert handed_over + len(collected) == steps
    assert schedule.state.position == len(collected)
    assert schedule.warm_up_steps >= interval


@settings(deadline=None)
@given(interval=st.integers(1, 5), cut=st.integers(0, 60), rest=st.integers(0, 40))
def test_a_restored_schedule_continues(interval: int, cut: int, rest: int) -> None:
    straight = PredictiveSchedule(interval, overlap=True, warm_up_steps=None)
    walk(straight, cut)
    restored = PredictiveSchedule(None, overlap=True, warm_up_steps=None)
    restored.load_state_dict(straight.state_dict(), straight.state.position)
    assert walk(restored, rest) == walk(straight, rest)


def test_an_open_interval_is_chosen_after_measured_steps() -> None:
    schedule = PredictiveSchedule(None, overlap=True, warm_up_steps=None)
    for _ in range(MEASURED_STEPS):
        assert not schedule.wants_interval
        assert [p.source for p in walk(schedule, 1)] == [WeightSource.EXACT]
    assert schedule.wants_interval
    schedule.choose_interval(2)
    plans = walk(schedule, 60)
    assert schedule.state.interval == 2
    assert plans[0].source is WeightSource.EXACT
    assert plans[-1].source in (WeightSource.DRIFTED, WeightSource.PREDICTED)
    assert (
        plans.index(next(p for p in plans if p.publish_ahead))
        == schedule.warm_up_steps - MEASURED_STEPS - 1
    )


def test_steps_before_a_load_were_not_measured() -> None:
    before = PredictiveSchedule(None, overlap=True, warm_up_steps=None)
    walk(before, MEASURED_STEPS)
    loaded = PredictiveSchedule(None, overlap=True, warm_up_steps=None)
    loaded.load_state_dict(before.state_dict(), before.state.position)
    for _ in range(MEASURED_STEPS):
        assert not loaded.wants_interval
        walk(loaded, 1)
    assert loaded.wants_interval


STEPS = st.tuples(st.just("steps"), st.tuples(st.integers(1, 40), st.sampled_from([0.1, 2.0])))
LOAD = st.tuples(
    st.just("load"),
    st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 9)), st.booleans()),
)


@settings(deadline=None, max_examples=300)
@given(
    interval=st.one_of(st.none(), st.integers(1, 8)),
    warm_up=st.one_of(st.none(), st.integers(0, 9)),
    measured=st.integers(1, 8),
    events=st.lists(st.one_of(STEPS, LOAD, st.just(("restart", None))), max_size=8),
)
def test_no_step_overlaps_unless_the_worker_has_published_ahead(
    interval: int | None, warm_up: int | None, measured: int, events: list
) -> None:
    """Whatever was before: an interval is measured, the guard trips and releases, p is replaced, or
    the run resumes with other settings. An open interval is chosen by as many steps of this process
    as are to be measured."""
    schedule = PredictiveSchedule(interval, True, warm_up, guarded=True)
    is_ahead = False
    since_start = 0
    overlaps = True
    for event, value in [*events, ("steps", (60, 0.1))]:
        if event == "restart":
            schedule.restart()
            is_ahead, since_start = False, 0
        elif event == "load":
            saved, position = schedule.state_dict(), schedule.state.position
            if position and not value[0]:
                continue  # such a checkpoint is not continued
            overlaps, warm_up, guarded = value
            schedule = PredictiveSchedule(schedule.interval, overlaps, warm_up, guarded)
            schedule.load_state_dict(saved, position)
            since_start = 0
        else:
            for _ in range(value[0]):
                if schedule.plan().waits_first and schedule.wants_verdict:
                    schedule.judge(value[1])
                plan = schedule.plan()
                assert is_ahead or plan.source is WeightSource.EXACT
                assert overlaps or not plan.publish_ahead
                schedule.advance(plan)
                is_ahead, since_start = plan.publish_ahead, since_start + 1
                if schedule.wants_interval:
                    assert since_start >= MEASURED_STEPS
                    schedule.choose_interval(measured)
    if overlaps:
        assert schedule.plan().source is not WeightSource.EXACT or schedule.state.guard.synchronous


@pytest.mark.parametrize(
    ("worker", "device", "expected"),
    [(1.0, 2.0, 1), (1.0, 1.06, 1), (1.0, 1.0, 2), (2.0, 1.0, 3), (9.0, 1.0, 8)],
)
def test_smallest_interval_that_the_worker_keeps_up_with(
    worker: float, device: float, expected: int
) -> None:
    assert smallest_interval(worker, device, limit=8) == expected


@settings(deadline=None)
@given(worker=st.floats(1e-3, 1e3), device=st.floats(1e-3, 1e3), limit=st.integers(1, 16))
def test_interval_is_minimal_and_sufficient(worker: float, device: float, limit: int) -> None:
    def keeps_up(interval: int) -> bool:
        return worker * (26 + 2 * interval) / 28 <= 0.95 * interval * device

    chosen = smallest_interval(worker, device, limit)
    assert 1 <= chosen <= limit
    assert chosen == limit or keeps_up(chosen)
    assert not any(keeps_up(smaller) for smaller in range(1, chosen))


@pytest.mark.parametrize(
    ("warm_up", "steps"),
    [(None, 40), (0, MEASURED_STEPS + 1), (MEASURED_STEPS + 5, MEASURED_STEPS + 5)],
)
def test_an_interval_that_is_measured_is_chosen_within_the_warm_up(
    warm_up: int | None, steps: int
) -> None:
    """At least one step is left after the measurement, in which the worker publishes ahead."""
    schedule = PredictiveSchedule(None, overlap=True, warm_up_steps=warm_up)
    assert schedule.warm_up_steps == max(steps, MEASURED_STEPS + 1)
    walk(schedule, MEASURED_STEPS)
    assert schedule.wants_interval
    schedule.choose_interval(2)
    assert schedule.warm_up_steps == max(40 if warm_up is None else warm_up, 2)
    assert schedule.plan().source is WeightSource.EXACT


@pytest.mark.parametrize(
    ("worker", "device", "interval", "overloaded"),
    [
        (1.0, 1.0, 1, False),
        (1.1, 1.0, 1, True),
        (0.9, 1.0, 1, False),
        (5.0, 2.0, 4, False),
        (8.0, 1.0, 4, True),
    ],
)
def test_a_worker_is_overloaded_if_an_interval_takes_it_longer_than_the_device(
    worker: float, device: float, interval: int, overloaded: bool
) -> None:
    assert is_overloaded(worker, device, interval) is overloaded
    assert not is_overloaded(float("inf"), device, interval), "nothing is known yet"
