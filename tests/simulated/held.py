"""Measure the device memory that training holds in each phase of a step. A simulation counts the
bytes, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tests.simulated.overlap import WIDTH, Layers
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

LAYERS, STEPS = 16, 4
PHASES = ("initialize", "forward", "backward", "step")


def held(stage: int, rule: dict[str, Any], hidden: bool) -> dict[str, tuple[int, int]]:
    """Phase -> bytes at its end and most bytes within it, of the last of some steps."""
    config = zenflow_config(stage, overlap_step=True, hide_transfers=hidden, **rule)
    config["zero_optimization"]["reduce_bucket_size"] = 2 * WIDTH * WIDTH
    return run_ranks(1, held_body, config, device="sim", pool=f"simulated memory, stage {stage}")[0]


def held_body(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    accelerator = get_accelerator()
    accelerator.synchronize()
    before = accelerator.memory_allocated()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        accelerator.synchronize()
        accelerator.reset_peak_memory_stats()
        yield
        accelerator.synchronize()
        found[name] = (
            accelerator.memory_allocated() - before,
            accelerator.max_memory_allocated() - before,
        )

    def train(rows: torch.Tensor, in_phase: Callable[[str], Any]) -> None:
        with in_phase("forward"):
            loss = engine(rows)
        with in_phase("backward"):
            engine.backward(loss)
            del loss
        with in_phase("step"):
            engine.step()

    with phase("initialize"):
        engine = make_engine(config, model=partial(Layers, LAYERS))
    rows = on_device(torch.randn(4, WIDTH).bfloat16())
    for _ in range(STEPS):
        train(rows, phase)
    engine.destroy()
    return found
