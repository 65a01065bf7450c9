"""The selective schedule: every gradient counts once, nothing is overwritten, blocks move only
while nothing is on its way."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings, unknown_epoch
from deepspeed_ext.zenflow.rules.selective.schedule import SelectivePlan, SelectiveSchedule


def make(
    interval: int, lag: int | None, select_interval: int | None, warm_up: int
) -> SelectiveSchedule:
    settings = ZenFlowConfig(
        topk_ratio=0.1,
        update_interval=interval,
        overlap_step=lag is not None,
        overlap_lag=lag or 1,
        select_strategy="auto",
        select_interval=select_interval,
        full_warm_up_rounds=warm_up,
    )
    return SelectiveSchedule(SelectiveSettings.of(settings))


def walk(schedule: SelectiveSchedule, steps: int) -> list[SelectivePlan]:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


def test_interval_three_as_drawn_in_the_module() -> None:
    plans = walk(make(3, 1, 6, 1), 10)
    assert [p.exact for p in plans] == [True] + [False] * 9
    assert [p.handed_over for p in plans] == [1, 0, 0, 3, 0, 0, 3, 0, 0, 3]
    assert [p.applies for p in plans] == [False] * 4 + [True] + [False] * 5
    assert [p.waits for p in plans] == [True] + [False] * 5 + [True] + [False] * 3
    assert [p.selects for p in plans] == [True] + [False] * 5 + [True] + [False] * 3


schedules = st.integers(1, 6).flatmap(
    lambda interval: st.tuples(
        st.just(interval),
        st.one_of(st.none(), st.integers(1, interval)),
        st.one_of(st.none(), st.integers(interval, 30)),
        st.integers(0, 5),
    )
)


@settings(deadline=None)
@given(schedules, st.integers(0, 80))
def test_every_gradient_is_handed_over_once_and_kept_until_it_is_used(
    settings: tuple, steps: int
) -> None:
    interval, lag, _, warm_up = settings
    schedule = make(*settings)
    assert schedule.ring == interval + max(0, (lag or 0) - 1)
    collected: list[int] = []
    in_flight: tuple[int, list[int]] | None = None
    last_selection = -1
    for number in range(steps):
        plan = schedule.plan()
        assert plan.exact == (number < max(1, warm_up))
        if plan.applies:
            assert in_flight is not None
            assert number == in_flight[0] + (lag or 0)
            in_flight = None
        collected.append(schedule.coming)
        busy = in_flight[1] if in_flight else []
        assert len({*collected, *busy}) == len(collected) + len(busy), "a gradient is overwritten"
        if plan.handed_over:
            assert plan.handed_over == len(collected) == (1 if plan.exact else interval)
            if not plan.waits:
                assert in_flight is None
                in_flight = (number, collected)
            collected = []
        if plan.selects:
            assert in_flight is None
            assert not collected
            assert (number - last_selection) % interval == 0 or last_selection < 0
            last_selection = number
        if lag is None:
            assert not plan.applies
            assert plan.waits == bool(plan.handed_over)
        schedule.advance(plan)


def test_a_saved_position_continues() -> None:
    whole = walk(make(4, 2, 8, 3), 40)
    for stop in range(20):
        schedule = make(4, 2, 8, 3)
        walk(schedule, stop)
        again = make(4, 2, 8, 3)
        again.load_state_dict(schedule.state_dict(), schedule.state.position)
        assert walk(again, 40 - stop) == whole[stop:]


@pytest.mark.parametrize(
    ("settings", "interval", "expected"),
    [
        ({}, 1, 16),
        ({}, 8, 32),
        ({"select_interval": 10}, 4, 12),
        ({"select_strategy": "step", "select_interval": 8}, 4, 8),
        ({"select_strategy": "epoch"}, 4, 0),
    ],
)
def test_selections_come_after_whole_intervals(
    settings: dict, interval: int, expected: int
) -> None:
    found = SelectiveSettings.of(ZenFlowConfig(topk_ratio=0.1, **settings))
    assert found.steps_between_selections(interval) == expected


def test_epochs_are_counted_in_steps() -> None:
    config = ZenFlowConfig(topk_ratio=0.1, select_strategy="epoch", select_interval=2)
    assert SelectiveSettings.of(config, steps_per_epoch=7).steps_between_selections(4) == 16


@pytest.mark.parametrize(
    ("settings", "longest", "slots"),
    [
        ({}, 8, 8),
        ({"select_strategy": "step", "select_interval": 4}, 4, 4),
        ({"select_strategy": "step", "select_interval": 20}, 8, 8),
        ({"select_strategy": "epoch"}, 8, 8),  # selected once
        ({"overlap_step": True, "overlap_lag": 12}, 12, 23),
        ({"overlap_step": True, "overlap_lag": 3, "select_interval": 4}, 4, 6),
        ({"update_interval": 2, "select_interval": 4}, 2, 2),
    ],
)
def test_an_open_interval_ends_before_the_next_selection(
    settings: dict, longest: int, slots: int
) -> None:
    found = SelectiveSettings.of(ZenFlowConfig(topk_ratio=0.1, **settings))
    assert found.longest_interval == longest
    assert found.ring_at(longest, Arrival.AFTER_Y) == slots
    found.steps_between_selections(longest)  # else a step would raise an error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"select_strategy": "step"}, "select_interval"),
        (
            {"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            "update_interval = 4",
        ),
        ({"overlap_step": True, "overlap_lag": 3, "update_interval": 2}, "overlap_lag = 3"),
    ],
)
def test_intervals_that_contradict_one_another_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SelectiveSettings.of(ZenFlowConfig(topk_ratio=0.1, **settings))


@pytest.mark.parametrize(
    ("fields", "steps_per_epoch", "warns"),
    [
        ({"select_strategy": "epoch"}, None, True),
        ({"select_strategy": "epoch"}, 7, False),
        ({}, None, False),
        ({"update_rule": "exact"}, None, False),
    ],
)
def test_only_epochs_of_unknown_length_are_warned_of(
    fields: dict[str, Any], steps_per_epoch: int | None, warns: bool
) -> None:
    config = ZenFlowConfig(**{"update_rule": "selective", **fields})
    assert (unknown_epoch(config, steps_per_epoch) is not None) is warns
