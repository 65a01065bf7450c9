"""A run as a config file describes it."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.commands.memory.config_file import _accumulation


@pytest.mark.parametrize(
    ("config", "ranks", "steps"),
    [
        ({}, 4, 1),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 64}, 4, 3),
        ({"train_batch_size": 64}, 4, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, 4),
        ({"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4}, 4, 5),
        ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, 4, 1),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}, 2, 4),
    ],
)
def test_micro_steps_are_given_or_what_is_left_of_the_batch(config: dict[str, Any], ranks: int, steps: int) -> None:
    assert _accumulation(config, ranks) == steps
