"""Switching the extension on and off, and what a user gets for a config that cannot work."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from deepspeed_ext.adapter.engine import Engine, HybridEngine, PipeEngine
from deepspeed_ext.adapter.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.config.fields import RETIRED
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import group_timeout_seconds
from deepspeed_ext.zenflow.start import with_timeout
from tests.support.compare import base_config
from tests.support.models import OddModel
from tests.support.ranks import run_ranks

CPU = {"device": "cpu"}


def entry_points() -> list[Any]:
    return [
        deepspeed.initialize,
        deepspeed.DeepSpeedEngine,
        deepspeed.DeepSpeedHybridEngine,
        deepspeed.PipelineEngine,
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig,
    ]


def initialize(through: Any, zero: dict[str, Any], stage: int = 2) -> Any:
    config = base_config(stage, torch.bfloat16)
    config["zero_optimization"] |= zero
    model = OddModel()
    return through(model=model, model_parameters=model.parameters(), config=config)[0]


def test_enable_and_disable_are_idempotent_and_leave_no_trace() -> None:
    before = entry_points()
    deepspeed_ext.enable()
    deepspeed_ext.enable()
    assert entry_points()[1:] == [Engine, HybridEngine, PipeEngine, ZeroConfig]
    assert inspect.unwrap(deepspeed.initialize) is before[0]
    deepspeed_ext.disable()
    assert entry_points() == before
    deepspeed_ext.disable()
    assert entry_points() == before


def test_our_engines_are_deepspeeds() -> None:
    assert issubclass(HybridEngine, (deepspeed.DeepSpeedHybridEngine, Engine))
    assert issubclass(PipeEngine, (deepspeed.PipelineEngine, Engine))
    assert HybridEngine._configure_zero_optimizer is Engine._configure_zero_optimizer
    assert PipeEngine._configure_zero_optimizer is Engine._configure_zero_optimizer


def three_entries_body() -> list[str]:
    before = entry_points()
    found = []
    for through in (deepspeed.initialize, deepspeed_ext.initialize, deepspeed.initialize):
        found.append(type(initialize(through, {}).optimizer).__qualname__)
        assert entry_points() == before
    deepspeed_ext.enable()
    try:
        engine = initialize(deepspeed.initialize, {"flatten_tier": "host"})
        assert type(engine) is Engine
        assert [plan.tier for plan in engine.optimizer.flatten_plans] == ["host"]
        found.append(type(engine.optimizer).__qualname__)
        found.append(type(initialize(deepspeed_ext.initialize, {}).optimizer).__qualname__)
    finally:
        deepspeed_ext.disable()
    found.append(type(initialize(deepspeed.initialize, {}).optimizer).__qualname__)
    return found


def test_each_entry_builds_its_own_optimizer() -> None:
    (found,) = run_ranks(1, three_entries_body)
    stock, ours = "DeepSpeedZeroOptimizer", ZeroOptimizer.__qualname__
    assert found == [stock, ours, stock, ours, ours, stock]


def bad_config_body(zero: dict[str, Any], free_bytes: int | None) -> str:
    before = entry_points()
    real = allocation.free_accelerator_bytes
    with (
        patch.object(
            allocation,
            "free_accelerator_bytes",
            lambda: real() if free_bytes is None else free_bytes,
        ),
        pytest.raises(ConfigError) as error,
    ):
        initialize(deepspeed_ext.initialize, zero)
    assert entry_points() == before
    return str(error.value)


@pytest.mark.parametrize(
    ("zero", "free_bytes", "says"),
    [
        ({"flaten_tier": "host"}, None, ["zero_optimization.flaten_tier", "'host'"]),
        ({"flatten_tier": "accelerator"}, 1000, ['= "accelerator"', "1,000", "remove the field"]),
        ({"flatten_tier": "distributed"}, 1000, ['= "distributed"', "1,000", "remove the field"]),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_config_is_one_clear_error_on_every_rank(
    world_size: int, zero: dict[str, Any], free_bytes: int | None, says: list[str]
) -> None:
    if (zero, world_size) == ({"flatten_tier": "distributed"}, 1):
        says = ['flatten_tier = "distributed"', "at least 2 data-parallel ranks"]
    for message in run_ranks(world_size, bad_config_body, zero, free_bytes):
        for part in says:
            assert part in message


USES = "has no effect: this run uses ZeRO stage"


def warnings_body(stage: int, zero: dict[str, Any], sums: str | None) -> list[str]:
    config = base_config(stage, torch.bfloat16) | {"data_types": {"grad_accum_dtype": sums}}
    config["zero_optimization"] |= zero
    model = OddModel()
    with patch("deepspeed_ext.runtime.log.logger.warning") as warning:
        engine, *_ = deepspeed_ext.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    engine.destroy()
    return [call.args[0] for call in warning.call_args_list]


@pytest.mark.parametrize(
    ("stage", "zero", "says"),
    [
        (
            2,
            {"stage3_allgather_single_param": True},
            f"stage3_allgather_single_param {USES} 2 with ZeroOptimizer",
        ),
        (0, {"flatten_tier": "host"}, f"flatten_tier {USES} 0 with FP16_UnfusedOptimizer"),
        (1, {"flatten_tier": "host"}, f"flatten_tier {USES} 1 with BF16_Optimizer"),
        (
            2,
            {"core_binding": {"dry_run": True}},
            "core_binding has no effect: it is not enabled, nor is zenflow",
        ),
        (
            2,
            {"zenflow": {}, "elastic_checkpoint": True},
            "elastic_checkpoint has no effect: "
            "a checkpoint of any number of ranks is loaded without it",
        ),
        (
            3,
            {"zenflow": {}, "offload_param": CPU, "offload_optimizer": {**CPU, "ratio": 0.5}},
            "offload_optimizer.ratio has no effect: "
            "with offload_param, the whole optimizer is on the host",
        ),
        (
            3,
            {"zenflow": {"weights_arrive_in_forward": True}},
            f"zenflow.weights_arrive_in_forward is retired: {RETIRED['weights_arrive_in_forward']}",
        ),
    ],
)
def test_a_setting_without_effect_warns_on_rank_0_only(
    stage: int, zero: dict[str, Any], says: str
) -> None:
    sums = "fp32" if "BF16_Optimizer" in says else None
    on_rank_0, on_rank_1 = run_ranks(2, warnings_body, stage, zero, sums)
    assert on_rank_0 == [f"zero_optimization.{says}"]
    assert on_rank_1 == []


def startup_body() -> dict[str, Any]:
    engine = initialize(
        deepspeed_ext.initialize, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    )
    assert dist.get_world_size() == 2
    return engine.optimizer.measurements()


def test_measurements_have_the_time_and_the_peak_of_the_start() -> None:
    for measurements in run_ranks(2, startup_body, device="sim"):
        assert 0 < measurements["flatten_seconds"] < measurements["startup_seconds"]
        assert 0 < measurements["startup_peak_accelerator_gib"] < 0.01


def shorter_group_timeout(seconds: float) -> float:
    return group_timeout_seconds(
        torch.distributed.new_group([0], timeout=timedelta(seconds=seconds))
    )


@pytest.mark.cpu(
    reason="torch shows the options, which hold the timeout, of gloo's and NCCL's groups only"
)
def test_the_timeout_of_a_group_can_be_read() -> None:
    assert run_ranks(1, shorter_group_timeout, 77.0) == [77.0]


def test_a_worker_is_not_awaited_longer_than_the_other_ranks_wait() -> None:
    def settled(*groups: float, **zenflow: Any) -> float:
        return with_timeout(ZenFlowConfig(**zenflow), groups).worker_timeout_seconds

    assert settled(1800.0, 300.0) == 240
    assert settled(1800.0, 300.0, worker_timeout_seconds=299) == 299
    with pytest.raises(
        ConfigError, match=r"worker_timeout_seconds = 300 is not below .* 300 s.*DEEPSPEED_TIMEOUT"
    ):
        settled(1800.0, 300.0, worker_timeout_seconds=300)
    assert settled(1800.0, 60.0) == 30
    assert settled(worker_timeout_seconds=604_800) == 604_800, "a week: one rank waits for no other"
