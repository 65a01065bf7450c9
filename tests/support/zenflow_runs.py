"""Whole runs with ZenFlow on a rank, for tests on the CPU and on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from tests.support.models import OddModel
from tests.support.zenflow import Outcome, distance, offload_config, run


def with_and_without(config: dict, steps: int, **how: Any) -> tuple[Outcome, Outcome]:
    """A run of ZeRO-Offload, and ours."""
    how["rank"] = dist.get_rank()
    return run(offload_config(config), steps, extended=False, **how), run(config, steps, **how)


def difference(expected: Outcome, actual: Outcome) -> float:
    """`distance` of the two final models."""
    torch.manual_seed(1234)
    start = {name: p.detach().bfloat16().float() for name, p in OddModel().named_parameters()}
    return distance(expected.weights, actual.weights, start)
