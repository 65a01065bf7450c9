"""Bytes and steps of the rules, by hand: the predictive one for a partition of four blocks, the
selective one for one of eleven; the last block is short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.rule import RuleSettings, SelectiveSettings, settings_of
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE

NUMEL, BLOCKS = 3 * 32 + 5, 4
COLD, HOT = 10 * 32 + 5, 3
"""Elements under the selective rule; 3 of 10 whole blocks are hot: a quarter, rounded up."""


def predictive(overlapped: bool = True) -> RuleSettings:
    return RuleSettings(overlapped, None, block_size=32)


def selective(steps_per_epoch: int | None = None, **fields: Any) -> SelectiveSettings:
    config = ZenFlowConfig(**{"topk_ratio": 0.25, **fields})
    found = settings_of(config, steps_per_epoch=steps_per_epoch)
    assert isinstance(found, SelectiveSettings)
    return found


def test_a_denominator_for_each_block_is_kept_if_steps_overlap() -> None:
    assert predictive().nbytes(NUMEL, 2).kept == {"derived denominators": 4 * BLOCKS}
    assert predictive(overlapped=False).nbytes(NUMEL, 2).kept == {}
    assert predictive().nbytes(NUMEL, 2).saved == (4 * BLOCKS,)


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
    taken = predictive().nbytes(NUMEL, item, in_place=in_place)
    assert taken.step == floats * 4 * NUMEL + others


@pytest.mark.parametrize(
    ("dtype", "each"), [("float32", 2 * 4), ("bfloat16", 4 * 4 + 3 * 8), ("int8", 4 * 4 + 42)]
)
def test_a_share_has_temporaries_of_its_moments(dtype: str, each: int) -> None:
    layout = replace(ADAM_STATE, moment_dtype=dtype)
    assert layout.step_bytes(NUMEL, 32) == each * NUMEL + 3 * 4 * (NUMEL // 32)


@pytest.mark.parametrize("interval", [1, 2])
def test_hot_blocks_and_the_mean_are_kept(interval: int) -> None:
    """A hot element takes 12 bytes: p, m and v in fp32. Gradients take 4 here."""
    taken = selective(update_interval=interval).nbytes(COLD, 2, 4)
    mean = 4 * COLD if interval > 1 else 0
    assert taken.kept == {"hot blocks": HOT * (12 * 32 + 8), "mean gradient": mean}
    assert taken.saved == (8 * HOT, mean)


@pytest.mark.parametrize(
    ("fields", "interval", "every"),
    [
        ({}, 4, 16),
        ({"update_interval": "auto"}, 4, 16),
        ({"update_interval": 1}, 1, 16),
        ({"update_interval": 5}, 5, 20),
        ({"update_interval": 4, "select_interval": 5}, 4, 8),
        ({"update_interval": 3, "select_interval": 3}, 3, 3),
        ({"select_strategy": "step", "select_interval": 8}, 4, 8),
        ({"select_strategy": "step", "select_interval": 2}, 2, 2),
        ({"select_strategy": "epoch"}, 4, 0),
    ],
)
def test_selections_are_whole_intervals_apart(
    fields: dict[str, Any], interval: int, every: int
) -> None:
    found = selective(**fields)
    assert (found.interval, found.select_every_steps) == (interval, every)


def test_epochs_are_counted_in_steps_and_those_of_unknown_length_warned_of() -> None:
    epochs = {"select_strategy": "epoch", "select_interval": 2}
    assert selective(7, **epochs).select_every_steps == 16
    assert selective(7, **epochs).warning is None
    assert "training_data" in (selective(**epochs).warning or "")
    assert selective().warning is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"select_strategy": "step"}, "needs select_interval"),
        ({"select_interval": 2, "update_interval": 4}, "update_interval = 4"),
    ],
)
def test_intervals_that_contradict_one_another_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        selective(**fields)
