"""Bytes of the predictive rule, reckoned by hand for a partition of four blocks, the last one
short."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.predictive import LONGEST_MEASURED, PredictiveSettings
from deepspeed_ext.zenflow.plan.rule_bytes import bytes_of

NUMEL, BLOCKS = 3 * 32 + 5, 4


def settings(interval: int | None, overlapped: bool = True) -> PredictiveSettings:
    return PredictiveSettings(
        interval, overlapped, None, block_size=32, prediction_error_factor=0.0
    )


def test_a_denominator_for_each_block_is_kept_and_the_drift_of_longer_intervals() -> None:
    assert bytes_of(settings(1), NUMEL, 2).kept == {"derived denominators": 4 * BLOCKS}
    for interval in (None, 2):
        kept = bytes_of(settings(interval), NUMEL, 2).kept
        assert kept == {"derived denominators": 4 * BLOCKS, "drift": 2 * NUMEL}
    assert bytes_of(settings(2, overlapped=False), NUMEL, 2).kept == {}
    assert bytes_of(settings(2), NUMEL, 2).saved == (4 * BLOCKS, 2 * NUMEL)


def test_nothing_else_is_kept_moves_waits_or_is_exchanged() -> None:
    rule = settings(2)
    taken = bytes_of(rule, NUMEL, 2, ranks=4)
    assert taken.kept_on_host == taken.moved == taken.waiting == taken.exchange == 0


@pytest.mark.parametrize(
    ("interval", "overlapped", "slots"),
    [(1, True, 1), (4, True, 7), (4, False, 1), (None, True, 3)],
)
def test_the_ring_holds_nearly_two_intervals(
    interval: int | None, overlapped: bool, slots: int
) -> None:
    rule = settings(interval, overlapped)
    assert rule.ring_at(rule.longest_interval, Arrival.AFTER_Y) == slots
    assert rule.longest_interval == (interval or LONGEST_MEASURED)
