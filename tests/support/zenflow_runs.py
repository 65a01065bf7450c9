"""Whole runs with ZenFlow on a rank, for tests on the CPU and on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from tests.support.models import OddModel, batches, two_groups
from tests.support.zenflow import (
    Outcome,
    distance,
    make_engine,
    offload_config,
    run,
    train,
    weights_of,
    zenflow_config,
)


def initial_weights(stage: int, dtype: torch.dtype) -> dict:
    engine = make_engine(zenflow_config(stage, dtype))
    found = weights_of(engine)
    engine.destroy()
    return found


def with_and_without(config: dict, steps: int, **how: Any) -> tuple[Outcome, Outcome]:
    """A run of ZeRO-Offload, and ours."""
    how["rank"] = dist.get_rank()
    return run(offload_config(config), steps, extended=False, **how), run(config, steps, **how)


def difference(expected: Outcome, actual: Outcome) -> float:
    """`distance` of the two final models."""
    start = {name: p.detach().bfloat16().float() for name, p in start_model().named_parameters()}
    return distance(expected.weights, actual.weights, start)


def start_model() -> OddModel:
    torch.manual_seed(1234)
    return OddModel()


def selective_config(
    stage: int, dtype: torch.dtype = torch.float32, **zenflow: Any
) -> dict[str, Any]:
    defaults = {
        "topk_ratio": 0.1,
        "update_interval": 2,
        "select_interval": 4,
    }
    return zenflow_config(stage, dtype, **{**defaults, **zenflow})


def losses_of(config: dict, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of a run, and its figures and weights."""
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, batches(steps, dist.get_rank()))
    adam = engine.optimizer.host_optimizer
    found = {
        "figures": adam.measurements(),
        "weights": weights_of(engine),
    }
    engine.destroy()
    return losses, found
