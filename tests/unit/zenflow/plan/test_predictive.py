"""Bytes of the predictive rule, reckoned by hand for a partition of four blocks, the last one
short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

NUMEL, BLOCKS = 3 * 32 + 5, 4


def settings(overlapped: bool = True) -> RuleSettings:
    return RuleSettings(overlapped, None, block_size=32, prediction_error_factor=0.0)


def test_a_denominator_for_each_block_is_kept_if_steps_overlap() -> None:
    assert settings().nbytes(NUMEL, 2).kept == {"derived denominators": 4 * BLOCKS}
    assert settings(overlapped=False).nbytes(NUMEL, 2).kept == {}
    assert settings().nbytes(NUMEL, 2).saved == (4 * BLOCKS,)


@pytest.mark.parametrize(
    ("item", "in_place", "floats", "others"),
    [
        (2, False, 3, 2 * NUMEL),  # to predict 16-bit weights, and y that arrives
        (2, True, 3, 4 * BLOCKS),  # and what each block is multiplied by
        (4, False, 1, 4 * NUMEL),
    ],
)
def test_a_step_has_temporaries_of_fp32(
    item: int, in_place: bool, floats: int, others: int
) -> None:
    taken = settings().nbytes(NUMEL, item, in_place=in_place)
    assert taken.step == floats * 4 * NUMEL + others


@pytest.mark.parametrize(
    ("layout", "each", "blocks"),
    [
        (ADAM_STATE, 2 * 4, 3 * 4 * (NUMEL // 32)),
        (replace(ADAM_STATE, moment_dtype="bfloat16"), 4 * 4 + 3 * 8, 3 * 4 * (NUMEL // 32)),
        (replace(ADAM_STATE, moment_dtype="int8"), 4 * 4 + 42, 3 * 4 * (NUMEL // 32)),
    ],
)
def test_a_share_has_temporaries_of_its_moments(
    layout: StateLayout, each: int, blocks: int
) -> None:
    assert layout.step_bytes(NUMEL, 32) == each * NUMEL + blocks
