"""Bytes of the predictive rule, reckoned by hand for a partition of four blocks, the last one
short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.predictive import LONGEST_MEASURED, PredictiveSettings
from deepspeed_ext.zenflow.plan.rule_bytes import share_step_bytes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

NUMEL, BLOCKS = 3 * 32 + 5, 4


def settings(interval: int | None, overlapped: bool = True) -> PredictiveSettings:
    return PredictiveSettings(
        interval, overlapped, None, block_size=32, prediction_error_factor=0.0
    )


def test_a_denominator_for_each_block_is_kept_and_the_drift_of_longer_intervals() -> None:
    assert settings(1).nbytes(NUMEL, 2).kept == {"derived denominators": 4 * BLOCKS}
    for interval in (None, 2):
        kept = settings(interval).nbytes(NUMEL, 2).kept
        assert kept == {"derived denominators": 4 * BLOCKS, "drift": 2 * NUMEL}
    assert settings(2, overlapped=False).nbytes(NUMEL, 2).kept == {}
    assert settings(2).nbytes(NUMEL, 2).saved == (4 * BLOCKS, 2 * NUMEL)


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


@pytest.mark.parametrize(
    ("interval", "weights_bytes", "in_place", "floats", "others"),
    [
        (1, 2, False, 3, 2 * NUMEL),  # to predict 16-bit weights, and y that arrives
        (1, 2, True, 3, 4 * BLOCKS),  # and what each block is multiplied by
        (1, 4, False, 1, 2 * NUMEL),
        (2, 2, False, 4, 4 * BLOCKS),  # to move D
        (2, 4, False, 2, 2 * NUMEL),
    ],
)
def test_a_step_has_temporaries_of_fp32(
    interval: int, weights_bytes: int, in_place: bool, floats: int, others: int
) -> None:
    taken = settings(interval).nbytes(NUMEL, weights_bytes, arrived_bytes=2, in_place=in_place)
    assert taken.step == floats * 4 * NUMEL + others


@pytest.mark.parametrize(
    ("layout", "each", "blocks"),
    [
        (ADAM_STATE, 2 * 4, 3 * 4 * (NUMEL // 32)),
        (replace(ADAM_STATE, moment_dtype="bfloat16"), 4 * 4 + 3 * 8, 3 * 4 * (NUMEL // 32)),
        (replace(ADAM_STATE, moment_dtype="int8"), 4 * 4 + 42, 3 * 4 * (NUMEL // 32)),
        (LION_STATE, 3 * 4, 0),
    ],
)
def test_a_share_has_temporaries_of_its_moments(
    layout: StateLayout, each: int, blocks: int
) -> None:
    assert share_step_bytes(NUMEL, 32, layout) == each * NUMEL + blocks


def test_estimates_use_the_drift_of_intervals_beyond_one() -> None:
    assert settings(1).with_drift == (False,)
    assert settings(2).with_drift == (True,)
    assert settings(None).with_drift == (True, False)
    assert settings(None, overlapped=False).with_drift == (False,)
