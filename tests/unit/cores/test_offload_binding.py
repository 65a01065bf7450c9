"""Engines under core binding: ranks keep to shares of the host that do not overlap, and give the
cores back."""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext import cores as masks
from deepspeed_ext.config import CoreBindingConfig
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.cores.host import own_masks
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.models import OddModel, batches, on_device, this_device
from tests.support.ranks import run_fresh_ranks
from tests.support.zenflow import make_engine, train, zenflow_config

CPUS = sorted(os.sched_getaffinity(0))

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def train_bound() -> dict[str, Any]:
    rank = dist.get_rank()
    before = set(own_masks().values())
    binding = CoreBinding.start(
        CoreBindingConfig(), RankGroup.of(None, this_device()), local_rank=rank, separate=False
    )
    model = OddModel()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[
        0
    ]
    for batch in batches(3, rank):
        engine.backward(engine(on_device(batch)))
        engine.step()
        binding.refresh()
    answer = {
        "planned": set(binding.plan.pytorch),
        "used": set().union(*own_masks().values()),
        "place": binding.worker_placement,
        "threads": torch.get_num_threads(),
        "summary": binding.agreement.summary,
    }
    binding.restore()
    return answer | {"restored": set(own_masks().values()) == before}


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_ranks_train_on_their_own_cores_and_go_back() -> None:
    outcomes = run_fresh_ranks(2, train_bound)
    assert [outcome.error for outcome in outcomes] == [None, None]
    first, second = (outcome.value for outcome in outcomes)
    assert not first["planned"] & second["planned"]
    for answer in (first, second):
        assert answer["restored"]
        assert answer["used"] == answer["planned"]
        assert 1 <= answer["threads"] <= len(answer["planned"])
        assert answer["place"] is None
        assert "local rank 1" in answer["summary"]


def state_of_threads() -> tuple[Any, ...]:
    return set(own_masks().values()), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def two_engines(config: dict[str, Any], end: str) -> dict[str, Any]:
    """Plans of two engines that live at once, and how the threads run as one after the other
    ends."""
    states = [state_of_threads()]
    # as if torch had been imported before deepspeed_ext
    with patch.object(masks, "_initial", None):
        engines = [make_engine(config) for _ in range(2)]
        for engine in engines:
            train(engine, batches(2, 0))
        plans = [engine.core_binding.plan for engine in engines]
        states.append(state_of_threads())
        engines[0].destroy()
        states.append(state_of_threads())
        if end == "destroyed":
            engines[1].destroy()
        del engine, engines
        gc.collect()
        states.append(state_of_threads())
    return {"plans": plans, "states": states}


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("zenflow", "end"), [(True, "dropped"), (False, "destroyed")])
def test_two_engines_share_a_plan_and_the_last_one_gives_the_cores_back(
    zenflow: bool, end: str
) -> None:
    config = zenflow_config(2)
    config["zero_optimization"]["core_binding"] = {"enabled": True}
    if not zenflow:
        del config["zero_optimization"]["zenflow"]
    (outcome,) = run_fresh_ranks(1, two_engines, config, end)
    assert outcome.error is None
    first, second = outcome.value["plans"]
    assert first == second
    before, both, one, none = outcome.value["states"]
    assert both == one != before
    assert none == before
