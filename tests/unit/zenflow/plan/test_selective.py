"""Bytes and steps of the selective rule, reckoned by hand for a partition of eleven blocks, the
last one short."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.rule_bytes import bytes_of
from deepspeed_ext.zenflow.plan.selective import (
    SelectiveSettings,
    hot_blocks,
    most_hot_blocks,
    ring_of,
)

BLOCK, NUMEL, HOT = 32, 10 * 32 + 5, 3
"""3 of 11 blocks are hot: a quarter, rounded up."""
STATE = 12 * BLOCK + 4
"""Of a hot block: p, m and v in fp32, and how often it was updated."""


def settings(**fields: Any) -> SelectiveSettings:
    usual: dict[str, Any] = {
        "update_interval": 2,
        "lag": 1,
        "warm_up_steps": 0,
        "block_size": BLOCK,
        "topk_ratio": 0.25,
        "select_every_steps": None,
        "keeps_hot_on_host": False,
        "auto_ratio": 0.99,
    }
    return SelectiveSettings(**usual | fields)


def test_hot_blocks_are_on_the_accelerator_or_on_the_host() -> None:
    here, away = settings(), settings(keeps_hot_on_host=True)
    assert here.hot_blocks(NUMEL) == away.hot_blocks(NUMEL) == HOT
    assert bytes_of(here, NUMEL, 2).kept == {"hot state": HOT * (STATE + 8)}
    assert bytes_of(away, NUMEL, 2).kept == {"hot block numbers": HOT * 8}
    assert (bytes_of(here, NUMEL).kept_on_host, bytes_of(away, NUMEL).kept_on_host) == (
        0,
        HOT * STATE,
    )


def test_what_moves_waits_is_saved_and_is_exchanged() -> None:
    rule = settings()
    taken = bytes_of(rule, NUMEL, 2)
    assert (taken.moved, taken.waiting) == (HOT * BLOCK * 4, HOT * BLOCK * 2)
    assert (taken.copied, taken.saved) == (4 * 11, (8 * HOT,))
    assert [bytes_of(rule, NUMEL, 2, ranks=ranks).exchange for ranks in (1, 2, 5)] == [
        0,
        3 * HOT * 64,
        6 * HOT * 64,
    ]


def test_a_block_is_hot_if_any_is_and_no_rank_has_more_than_twice_its_share() -> None:
    assert [hot_blocks(11, ratio) for ratio in (0.0, 0.01, 0.25, 1.0)] == [0, 1, 3, 11]
    assert [most_hot_blocks(11, ratio) for ratio in (0.01, 0.25, 0.5, 1.0)] == [2, 6, 11, 11]


@pytest.mark.parametrize(
    ("interval", "lag", "slots"), [(1, 1, 1), (4, 0, 4), (4, 1, 4), (4, 2, 5), (4, 4, 7)]
)
def test_the_ring_holds_an_interval_and_what_is_in_flight(
    interval: int, lag: int, slots: int
) -> None:
    assert ring_of(interval, lag, Arrival.AFTER_Y) == slots
    rule = settings(update_interval=interval, lag=lag or None)
    assert rule.ring_at(rule.longest_interval, Arrival.AFTER_Y) == slots


@pytest.mark.parametrize(
    ("interval", "lag", "slots"), [(1, 0, 1), (1, 1, 2), (4, 0, 4), (4, 1, 4), (4, 2, 5)]
)
def test_gradients_made_on_the_host_never_come_to_the_slot_of_the_y_that_their_step_reads(
    interval: int, lag: int, slots: int
) -> None:
    assert ring_of(interval, lag, Arrival.BEFORE_Y) == slots
    rule = settings(update_interval=interval, lag=lag or None)
    assert rule.ring_at(rule.longest_interval, Arrival.BEFORE_Y) == slots


@pytest.mark.parametrize(
    ("interval", "lag", "every", "longest"),
    [
        (3, 1, None, 3),
        (None, 1, None, 8),
        (None, 1, 5, 5),
        (None, None, 0, 8),
        (None, 6, 5, 6),
    ],
)
def test_the_longest_interval_ends_with_the_selection_but_holds_the_lag(
    interval: int | None, lag: int | None, every: int | None, longest: int
) -> None:
    assert (
        settings(update_interval=interval, lag=lag, select_every_steps=every).longest_interval
        == longest
    )


@pytest.mark.parametrize(
    ("every", "interval", "steps"),
    [
        (None, 1, 16),
        (None, 4, 16),
        (None, 5, 20),
        (0, 4, 0),
        (4, 4, 4),
        (5, 4, 8),
        (8, 4, 8),
        (3, 3, 3),
    ],
)
def test_selections_are_whole_intervals_apart(every: int | None, interval: int, steps: int) -> None:
    assert settings(select_every_steps=every).steps_between_selections(interval) == steps


def test_selections_closer_than_an_interval_are_refused() -> None:
    with pytest.raises(ConfigError, match="every 3 steps"):
        settings(select_every_steps=3).steps_between_selections(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "select_strategy": "step",
                "select_interval": 2,
                "overlap_step": True,
                "overlap_lag": 3,
            },
            "overlap_lag = 3",
        ),
        ({"update_interval": 2, "overlap_step": True, "overlap_lag": 3}, "lower overlap_lag"),
        ({"select_strategy": "step"}, "needs select_interval"),
    ],
)
def test_intervals_that_contradict_each_other_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SelectiveSettings.of(ZenFlowConfig(update_rule="selective", **fields))


@pytest.mark.parametrize("fields", [{"overlap_lag": 3}, {"overlap_lag": 2}, {}])
def test_a_lag_up_to_the_time_between_selections_is_accepted_and_without_overlap_there_is_none(
    fields: dict[str, Any],
) -> None:
    config = {"update_rule": "selective", "select_strategy": "step", "select_interval": 3, **fields}
    assert SelectiveSettings.of(ZenFlowConfig(**config, overlap_step=True)).lag == fields.get(
        "overlap_lag", 1
    )
    assert SelectiveSettings.of(ZenFlowConfig(**config, overlap_step=False)).lag is None


@pytest.mark.parametrize("lag", [None, 1, 4])
@pytest.mark.parametrize("arrival", Arrival)
def test_while_the_interval_is_open_the_ring_has_the_slots_of_interval_one(
    lag: int | None, arrival: Arrival
) -> None:
    """With fewer, a gradient would be overwritten before the worker has read it."""
    of_one = settings(update_interval=1, lag=None if lag is None else 1)
    assert settings(update_interval=None, lag=lag).ring_at(None, arrival) == of_one.ring_at(
        1, arrival
    )
