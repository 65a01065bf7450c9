"""A model that is spread over tensor-parallel ranks: they choose alike, and fail together."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import deepspeed_ext
from deepspeed_ext.adapter.engine_construction import ranks_of_model
from deepspeed_ext.errors import ConfigError, WorkerError
from deepspeed_ext.zenflow.rules.guard import Sample
from tests.support.guarded import large_errors, probing
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.tensor_parallel import Grid, TensorParallelBlock, replicated
from tests.support.zenflow import RULES, full_masters_of, refusal, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS = 50
POOL = "tensor parallel"
"""DeepSpeed keeps an ``mpu`` for the whole process."""


def engine_of(config: dict[str, Any], mpu: Grid, width: int = 64) -> Any:
    torch.manual_seed(1234)
    model = TensorParallelBlock(mpu, width)
    engine, *_ = deepspeed_ext.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=copy.deepcopy(config),
        mpu=mpu,
    )
    return engine


def batches_of(engine: Any, steps: int, width: int = 64) -> list[torch.Tensor]:
    """The same on tensor-parallel ranks."""
    seed = dist.get_rank(group=engine.optimizer.dp_process_group)
    generator = torch.Generator().manual_seed(seed)
    like = next(engine.module.parameters())
    return [
        torch.randn(8, width, generator=generator).to(engine.device, like.dtype)
        for _ in range(steps)
    ]


def step(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(batch))
    engine.step()


def differing(engine: Any, mpu: Grid) -> list[str]:
    """Replicated parameters whose weights or masters differ between this rank and its
    tensor-parallel peers."""
    names, masters = [name for name, _ in engine.module.named_parameters()], full_masters_of(engine)
    values = {("weights", name): value for name, value in weights_of(engine).items()}
    values |= {("masters", name): value for name, value in zip(names, masters, strict=True)}
    found = []
    for (kind, name), value in values.items():
        if name not in replicated(engine.module):
            continue
        mine = value.to(engine.device).contiguous()
        peers = [torch.zeros_like(mine) for _ in range(mpu.get_model_parallel_world_size())]
        dist.all_gather(peers, mine, group=mpu.get_model_parallel_group())
        if not all(torch.equal(peer, peers[0]) for peer in peers):
            found.append(f"{kind} of {name}")
    return found


def train_apart(config: dict[str, Any]) -> list[str]:
    mpu = Grid(2)
    engine = engine_of(config, mpu)
    for batch in batches_of(engine, STEPS):
        step(engine, batch)
    found = differing(engine, mpu)
    engine.destroy()
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("stage", "ranks", "device"),
    [
        *((1, 2, "cpu"), (2, 4, "cpu"), (3, 2, "cpu")),
        *(pytest.param(stage, 2, "accelerator", marks=pytest.mark.gpu) for stage in (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replicated_parameters_stay_equal(
    stage: int, ranks: int, device: str, dtype: torch.dtype
) -> None:
    config = zenflow_config(stage, dtype, lr=1e-2, full_warm_up_rounds=8)
    assert run_ranks(ranks, train_apart, config, device=device, pool=POOL) == [[]] * ranks


def guarded_apart(config: dict[str, Any]) -> tuple[bool, list[str]]:
    mpu = Grid(2)
    with probing(1, 100), patch.object(Sample, "errors", large_errors(6, 5.0, 1)):
        engine = engine_of(config, mpu)
        for batch in batches_of(engine, 13):
            step(engine, batch)
    found = (
        engine.optimizer.host_optimizer.rule.schedule.state.guard.synchronous,
        differing(engine, mpu),
    )
    engine.destroy()
    return found


def test_the_guard_of_one_tensor_parallel_rank_makes_all_synchronous() -> None:
    config = zenflow_config(2, lr=1e-2, full_warm_up_rounds=2)
    assert run_ranks(2, guarded_apart, config, pool=POOL) == [(True, [])] * 2


# -- overflows -------------------------------------------------------------------------------------


def overflow_in_one_copy(config: dict[str, Any]) -> tuple[list[bool], list[str]]:
    """The gradient of a replicated bias is infinite in one step, on rank 1 alone: the norm counts
    such parameters on rank 0 only. Returns which steps were skipped, and what differs then."""
    mpu, skipped = Grid(2), []
    engine = engine_of(config, mpu)
    factors = [1.0, 1.0, float("inf") if dist.get_rank() == 1 else 1.0, 1.0]
    for factor, batch in zip(factors, batches_of(engine, len(factors)), strict=True):
        handle = engine.module.bias.register_hook(lambda grad, factor=factor: grad * factor)
        step(engine, batch)
        handle.remove()
        skipped.append(bool(engine.optimizer.overflow))
    found = differing(engine, mpu)
    engine.destroy()
    return skipped, found


@pytest.mark.parametrize("on_host", [False, True])
def test_an_overflow_that_the_norm_omits_skips_the_step_on_all_ranks(on_host: bool) -> None:
    config = zenflow_config(2, gradients_on_host=on_host)
    expected: tuple[list[bool], list[str]] = [False, False, True, False], []
    assert run_ranks(2, overflow_in_one_copy, config, pool=POOL) == [expected] * 2


# -- errors ----------------------------------------------------------------------------------------


def lose_a_worker(config: dict[str, Any]) -> str:
    """The worker of rank 1 dies after some steps."""
    mpu = Grid(2)
    engine = engine_of(config, mpu)
    told = ""
    try:
        for number, batch in enumerate(batches_of(engine, 20)):
            if number == 6 and dist.get_rank() == 1:
                os.kill(engine.optimizer.host_optimizer.link.process.pid, signal.SIGKILL)
            step(engine, batch)
    except WorkerError as error:
        told = str(error)
    engine.destroy()
    return told


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (1, 4), (3, 2)])
def test_a_worker_that_dies_is_the_same_error_on_every_rank_of_the_model(
    stage: int, ranks: int
) -> None:
    """No rank waits for the timeout of its group, which is longer than the test may take."""
    config = zenflow_config(stage, full_warm_up_rounds=2)
    outcomes = run_fresh_ranks(
        ranks, lose_a_worker, config, group_timeout_seconds=900.0, timeout_seconds=120.0
    )
    texts = [outcome.value for outcome in outcomes]
    assert [outcome.error for outcome in outcomes] == [None] * ranks
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: ")


def refuse_one(config: dict[str, Any]) -> str:
    mpu = Grid(2)
    if dist.get_rank() == 1:
        config["zero_optimization"]["zenflow"]["update_interval"] = 3
    try:
        engine_of(config, mpu).destroy()
    except deepspeed_ext.errors.PlanMismatchError as error:
        return str(error)
    return ""


def test_different_settings_on_tensor_parallel_ranks_are_refused_on_all() -> None:
    first, second = run_ranks(2, refuse_one, zenflow_config(2), pool=POOL)
    assert first == second
    assert "rank 0" in first
    assert "rank 1" in first


# -- what would train copies apart, and is refused -------------------------------------------------


def refused_on_a_grid(config: dict[str, Any]) -> str:
    return refusal(config, lambda config: engine_of(config, Grid(2)))


def test_the_selective_rule_is_refused_with_tensor_parallel_ranks_only() -> None:
    config = zenflow_config(2, **RULES["selective"])
    told = run_ranks(2, refused_on_a_grid, config, pool=POOL)
    assert all('update_rule = "selective" with 2 tensor-parallel ranks' in text for text in told)
    assert run_ranks(2, refused_on_a_grid, zenflow_config(2), pool=POOL) == ["accepted"] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_auto_ep_replaces_are_refused(stage: int) -> None:
    config = zenflow_config(stage)
    config["expert_parallel"] = {"enabled": True, "autoep_size": 1, "preset_model": "mixtral"}
    assert "expert_parallel.enabled = true" in run_ranks(1, refusal, config)[0]
    config["expert_parallel"]["enabled"] = False
    assert run_ranks(1, refusal, config) == ["accepted"]


# -- pipelines -------------------------------------------------------------------------------------


class First(torch.nn.Linear):
    """A layer that another stage may share."""

    def __init__(self) -> None:
        super().__init__(33, 33)


def pipeline_of(config: dict[str, Any], *, tied: bool = False) -> Any:
    torch.manual_seed(1234)
    ends = [TiedLayerSpec("end", First) if tied else LayerSpec(First) for _ in range(2)]
    layers = [ends[0], LayerSpec(torch.nn.ReLU), LayerSpec(torch.nn.Linear, 33, 33), ends[1]]
    loss = torch.nn.functional.mse_loss
    module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed_ext.initialize(
        model=module, model_parameters=list(module.parameters()), config=copy.deepcopy(config)
    )
    return engine


def train_pipeline(config: dict[str, Any], kills: bool) -> str:
    """Train; the worker of the last stage dies if wanted."""
    told = ""
    generator = torch.Generator().manual_seed(7)
    data = (
        (torch.randn(4, 33, generator=generator), torch.randn(4, 33, generator=generator))
        for _ in range(80)
    )
    engine = pipeline_of(config)
    try:
        for number in range(20):
            if kills and number == 12 and dist.get_rank() == 1:
                os.kill(engine.optimizer.host_optimizer.link.process.pid, signal.SIGKILL)
            engine.train_batch(data)
    except WorkerError as error:
        told = str(error)
    engine.destroy()
    return told


@pytest.mark.parametrize("kills", [False, True])
def test_stages_of_a_pipeline_fail_together(kills: bool) -> None:
    """In groups of their own, because the last stage waits for the other's activations."""
    config = zenflow_config(1, torch.float32, accumulation=2, full_warm_up_rounds=8)
    outcomes = run_fresh_ranks(2, train_pipeline, config, kills, timeout_seconds=120.0)
    assert [outcome.error for outcome in outcomes] == [None, None]
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    assert first.startswith("rank 1: ") == kills


def refuse_pipeline(config: dict[str, Any], tied: bool) -> str:
    return refusal(config, pipeline_of, tied=tied)


@pytest.mark.parametrize(
    ("rule", "tied", "accepted"),
    [("selective", True, False), ("selective", False, True), ("predictive", True, True)],
)
def test_the_selective_rule_is_refused_for_stages_that_share_layers(
    rule: str, tied: bool, accepted: bool
) -> None:
    config = zenflow_config(1, torch.float32, **RULES[rule])
    outcomes = run_fresh_ranks(2, refuse_pipeline, config, tied)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        assert (
            outcome.value == "accepted"
            if accepted
            else "stages of a pipeline share" in outcome.value
        )


# -- the grid --------------------------------------------------------------------------------------


def on_a_grid(tensor: int) -> tuple[int, int]:
    ranks = ranks_of_model(Grid(tensor))
    return ranks.rank, ranks.size


@pytest.mark.parametrize(("world", "tensor"), [(4, 2), (4, 1), (4, 4), (6, 3), (1, 1)])
def test_all_ranks_of_a_grid_agree(world: int, tensor: int) -> None:
    assert run_ranks(world, on_a_grid, tensor) == [(rank, world) for rank in range(world)]


class _Overlapping:
    """An mpu whose groups share two ranks without one holding the other."""

    def __init__(self) -> None:
        self.get_data_parallel_group = partial(getattr, self, "_data")
        self.get_model_parallel_group = partial(getattr, self, "_model")
        self._data, self._model = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])


def refused() -> str:
    mpu = _Overlapping()
    try:
        if dist.get_rank() < 2:
            ranks_of_model(mpu)
    except ConfigError as error:
        return str(error)
    return ""


def test_groups_that_are_no_grid_are_refused() -> None:
    told = run_ranks(4, refused)
    assert all("[[0, 1, 2], [0, 1, 3]]" in text for text in told[:2])
