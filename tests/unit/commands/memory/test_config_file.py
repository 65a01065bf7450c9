"""A run as a config file describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands.memory.config_file import _accumulation, _dtype, read_config
from deepspeed_ext.commands.memory.setup import Setup


@pytest.mark.parametrize(
    ("config", "ranks", "steps"),
    [
        ({}, 4, 1),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 64}, 4, 3),
        ({"train_batch_size": 64}, 4, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, 4),
        ({"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4}, 4, 5),
        ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, 4, 1),
        (
            {
                "gradient_accumulation_steps": "auto",
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 1,
            },
            2,
            4,
        ),
    ],
)
def test_micro_steps_are_given_or_what_is_left_of_the_batch(
    config: dict[str, Any], ranks: int, steps: int
) -> None:
    assert _accumulation(config, ranks) == steps


@pytest.mark.parametrize(
    ("config", "dtype", "notes"),
    [
        ({}, "float32", 0),
        ({"fp16": {"enabled": True}}, "float16", 0),
        ({"fp16": {"enabled": False}}, "float32", 0),
        ({"bf16": {"enabled": True}}, "bfloat16", 0),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, "bfloat16", 0),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bfloat16", 1),
    ],
)
def test_the_dtype_is_the_enabled_one(config: dict[str, Any], dtype: str, notes: int) -> None:
    found, told = _dtype(config)
    assert (found, len(told)) == (dtype, notes)


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("none", False)])
def test_an_optimizer_is_on_the_host_if_its_device_says_so(
    device: str, offloads: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": device, "pin_memory": True},
                }
            }
        )
    )
    setup = read_config(str(tmp_path / "config.json"), 2).setup
    assert (setup.offload, setup.pins) == (offloads, offloads)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_without_a_config_is_planned_as_one_whose_config_says_nothing(
    stage: Any, tmp_path: Path
) -> None:
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path / "config.json"), 2).setup == Setup(stage=stage)
