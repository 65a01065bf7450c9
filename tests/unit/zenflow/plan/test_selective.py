"""Bytes and steps of the selective rule, computed by hand for a partition of eleven blocks, the
last one short."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.rule import SelectiveSettings, settings_of

BLOCK, NUMEL, HOT = 32, 10 * 32 + 5, 3
"""3 of 10 whole blocks are hot: a quarter, rounded up."""
STATE = 12 * BLOCK
"""Bytes of a hot block: p, m and v in fp32."""


def settings(steps_per_epoch: int | None = None, **fields: Any) -> SelectiveSettings:
    config = ZenFlowConfig(**{"topk_ratio": 0.25, **fields})
    found = settings_of(config, steps_per_epoch=steps_per_epoch)
    assert isinstance(found, SelectiveSettings)
    return found


@pytest.mark.parametrize("interval", [1, 2])
def test_hot_blocks_and_the_mean_are_kept(interval: int) -> None:
    taken = settings(update_interval=interval).nbytes(NUMEL, 2)
    mean = 2 * NUMEL if interval > 1 else 0
    assert taken.kept == {"hot blocks": HOT * (STATE + 8), "mean gradient": mean}
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
    found = settings(**fields)
    assert (found.interval, found.select_every_steps) == (interval, every)


def test_epochs_are_counted_in_steps_and_those_of_unknown_length_warned_of() -> None:
    epochs = {"select_strategy": "epoch", "select_interval": 2}
    assert settings(7, **epochs).select_every_steps == 16
    assert settings(7, **epochs).warning is None
    assert "training_data" in (settings(**epochs).warning or "")
    assert settings().warning is None


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
        settings(**fields)
