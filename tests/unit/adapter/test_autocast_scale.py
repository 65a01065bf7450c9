"""The loss scale of `torch_autocast` in float16 is followed as DeepSpeed's own step would, and
recovers."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter.step import AutocastScale
from tests.support.models import batches
from tests.support.ranks import run_fresh_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def scale(init: float = 8.0) -> tuple[AutocastScale, Any]:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=init, growth_interval=3)
    scaler.scale(torch.ones(1))
    return AutocastScale(scaler), scaler


def test_each_partition_is_unscaled_and_counts_as_a_step() -> None:
    followed, _ = scale()
    assert [followed.factor() for _ in range(4)] == [1 / 8, 1 / 8, 1 / 8, 1 / 16]


def test_an_overflow_halves_the_scale() -> None:
    followed, scaler = scale()
    followed.factor()
    followed.overflowed()
    assert scaler.get_scale() == 4
    assert followed.factor() == 1 / 4


def test_a_saved_scale_goes_on_where_it_was() -> None:
    followed, _ = scale()
    followed.factor()
    other, _ = scale(init=1.0)
    other.load_state_dict(followed.state_dict())
    assert [other.factor() for _ in range(3)] == [1 / 8, 1 / 8, 1 / 16]


def overflowing(stage: int) -> list[tuple[bool, float]]:
    config = zenflow_config(stage, torch.float32) | {
        "torch_autocast": {"enabled": True, "dtype": "float16"}
    }
    engine, found = make_engine(config), []
    for number, batch in enumerate(batches(5, dist.get_rank())):
        train(engine, [batch], times=float("inf") if number in (1, 2) else 1.0)
        found.append(
            (engine.optimizer.overflow, engine.optimizer.torch_autocast_gradscaler.get_scale())
        )
    engine.destroy()
    return found


def test_training_goes_on_after_overflows() -> None:
    """In processes of its own: DeepSpeed keeps the setting for the process."""
    start = 2.0**16
    expected = [
        (False, start),
        (True, start / 2),
        (True, start / 4),
        (False, start / 4),
        (False, start / 4),
    ]
    for stage in (2, 3):
        assert [outcome.value for outcome in run_fresh_ranks(2, overflowing, stage)] == [
            expected
        ] * 2
