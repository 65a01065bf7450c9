"""Training whose weights arrive in the forward, and the same training whose steps wait for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.plan import chunks
from tests.support.compare import allow_fp16
from tests.support.models import OddModel, batches, two_groups
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

CHUNK = 512


class WithFrozen(OddModel):
    """One parameter is tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(37), requires_grad=False)


def exact_config(stage: int, *args: Any, **section: Any) -> dict[str, Any]:
    """The exact rule, whose weights arrive in the forward at stage 3."""
    return zenflow_config(stage, *args, **{"update_rule": "exact"} | section)


def waiting(config: dict[str, Any]) -> dict[str, Any]:
    """The same run, whose steps wait for their weights."""
    config = copy.deepcopy(config)
    config["zero_optimization"]["zenflow"] |= {"update_rule": "predictive", "overlap_step": False}
    return config


@contextmanager
def small_chunks() -> Iterator[None]:
    with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        yield


def outcome(config: dict[str, Any], model: Callable[[], Any] = WithFrozen) -> dict[str, Any]:
    allow_fp16()
    accumulation = config["gradient_accumulation_steps"]
    with small_chunks():
        engine = make_engine(config, model=model, groups=two_groups)
        losses = train(engine, batches(5 * accumulation, dist.get_rank()))
        assert engine.skipped_steps < 4
        found = {"losses": losses, "weights": weights_of(engine), "masters": masters_of(engine)}
        engine.destroy()
    return found


def differs(config: dict[str, Any], model: Callable[[], Any] = WithFrozen) -> str:
    return first_difference(outcome(waiting(config), model), outcome(config, model))
