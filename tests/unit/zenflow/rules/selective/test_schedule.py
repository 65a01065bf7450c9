"""The selective schedule: every gradient counts once, blocks move only while nothing is on its
way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.plan.rule import SelectiveSettings, settings_of
from deepspeed_ext.zenflow.rules.selective.schedule import SelectivePlan, SelectiveSchedule


def make(
    interval: int, overlapped: bool, select_interval: int | None = None, warm_up: int = 1
) -> SelectiveSchedule:
    config = ZenFlowConfig(
        topk_ratio=0.1,
        update_interval=interval,
        overlap_step=overlapped,
        select_interval=select_interval,
        full_warm_up_rounds=warm_up,
    )
    found = settings_of(config)
    assert isinstance(found, SelectiveSettings)
    return SelectiveSchedule(found, Source.BACKWARD)


def walk(schedule: SelectiveSchedule, steps: int) -> list[SelectivePlan]:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


def test_interval_three_as_drawn_in_the_module() -> None:
    plans = walk(make(3, True, 6), 10)
    assert [p.handed_over for p in plans] == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert [p.collected for p in plans] == [0, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [p.waits_first for p in plans] == [False] * 4 + [True] + [False] * 5
    assert [p.waits_last for p in plans] == [True] + [False] * 5 + [True] + [False] * 3
    assert [p.selects for p in plans] == [True] + [False] * 5 + [True] + [False] * 3


schedules = st.integers(1, 6).flatmap(
    lambda interval: st.tuples(
        st.just(interval),
        st.booleans(),
        st.one_of(st.none(), st.integers(interval, 30)),
        st.integers(0, 5),
    )
)


@settings(deadline=None)
@given(schedules, st.integers(0, 80))
def test_every_gradient_counts_once_and_no_slot_in_flight_is_written(
    settings: tuple[int, bool, int | None, int], steps: int
) -> None:
    interval, overlapped, _, warm_up = settings
    schedule = make(*settings)
    collected, slot_in_flight, last_selection = 0, None, -1
    for number in range(steps):
        plan = schedule.plan()
        assert schedule.coming != slot_in_flight, "gradients arrive in backward, before the step"
        assert plan.collected == collected
        assert plan.waits_first == (slot_in_flight is not None)
        assert plan.handed_over == (number < max(1, warm_up) or collected + 1 == interval)
        slot_in_flight = schedule.coming if plan.handed_over and not plan.waits_last else None
        collected = 0 if plan.handed_over else collected + 1
        if plan.selects:
            assert plan.waits_last
            assert (number - last_selection) % interval == 0 or last_selection < 0
            last_selection = number
        assert overlapped or plan.waits_last == bool(plan.handed_over)
        schedule.advance(plan)


@pytest.mark.parametrize("before", [2, 4, 6])
def test_a_saved_position_continues_also_with_another_interval(before: int) -> None:
    whole = walk(make(4, True, 8, 3), 40)
    for stop in range(20):
        schedule = make(4, True, 8, 3)
        walk(schedule, stop)
        again = make(4, True, 8, 3)
        again.load_state_dict(schedule.state_dict())
        assert walk(again, 40 - stop) == whole[stop:]
        changed = make(before, False)
        changed.load_state_dict(schedule.state_dict())
        assert max(plan.collected for plan in walk(changed, 20)[7:]) < before
