"""A script may end without ``engine.destroy()``, as most do: its exit status is 0, also while exact
weights are on their way."""

from __future__ import annotations

import os
import sys

import deepspeed
import pytest
import torch

import deepspeed_ext
from tests.support.forked import run_forked


def train(stage: int, rule: str) -> None:
    zero = {"stage": stage, "zenflow": {"update_rule": rule, "full_warm_up_rounds": 1}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    deepspeed_ext.enable()
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
        engine.step()
    sys.stdout.write("trained\n")


@pytest.mark.parametrize(
    ("stage", "rule"), [pytest.param(2, "predictive", marks=pytest.mark.full), (3, "exact")]
)
def test_a_script_that_ends_after_a_step_ends_well(stage: int, rule: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    done = run_forked(__name__, str(stage), rule, environment=environment)
    assert "trained" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
