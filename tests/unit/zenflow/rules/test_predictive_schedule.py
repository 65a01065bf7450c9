"""The schedule: every gradient is handed over once, in order, and nothing is written while the
worker may read it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.rule import slots_at
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule


def walk(schedule: PredictiveSchedule, steps: int) -> list:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


@pytest.mark.parametrize(
    ("source", "slots"),
    [(Source.COPY, 1), (Source.HOST, 2), (Source.BACKWARD, 2)],
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


@settings(deadline=None)
@given(cut=st.integers(0, 60), rest=st.integers(0, 40))
def test_a_restored_schedule_continues(cut: int, rest: int) -> None:
    straight = PredictiveSchedule(overlap=True, warm_up_steps=None)
    walk(straight, cut)
    restored = PredictiveSchedule(overlap=True, warm_up_steps=None)
    restored.load_state_dict(straight.state_dict())
    assert walk(restored, rest) == walk(straight, rest)


STEPS = st.tuples(st.just("steps"), st.tuples(st.integers(1, 40), st.sampled_from([0.1, 2.0])))
LOAD = st.tuples(
    st.just("load"),
    st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 9)), st.booleans()),
)


@settings(deadline=None, max_examples=300)
@given(
    warm_up=st.one_of(st.none(), st.integers(0, 9)),
    events=st.lists(st.one_of(STEPS, LOAD, st.just(("restart", None))), max_size=8),
)
def test_no_step_overlaps_unless_the_worker_has_published_ahead(
    warm_up: int | None, events: list
) -> None:
    """Whatever was before: the guard trips and releases, p is replaced, or the run resumes with
    other settings."""
    schedule = PredictiveSchedule(True, warm_up, guarded=True)
    is_ahead, overlaps = False, True
    for event, value in [*events, ("steps", (60, 0.1))]:
        if event == "restart":
            schedule.restart()
            is_ahead = False
        elif event == "load":
            saved = schedule.state_dict()
            overlaps, warm_up, guarded = value
            schedule = PredictiveSchedule(overlaps, warm_up, guarded)
            schedule.load_state_dict(saved)
        else:
            for _ in range(value[0]):
                if schedule.wants_verdict:
                    schedule.judge(value[1])
                plan = schedule.plan()
                assert is_ahead or not plan.predicts
                assert overlaps or not plan.publish_ahead
                schedule.advance(plan)
                is_ahead = plan.publish_ahead
    if overlaps:
        assert schedule.plan().predicts or schedule.state.guard.synchronous
