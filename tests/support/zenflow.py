"""Training with ZenFlow on real ranks, for tests: engines, loops, and what they leave behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import safe_get_full_fp32_param

import deepspeed_ext
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan import places
from tests.support.compare import base_config
from tests.support.models import OddModel, batches
from tests.support.planned import copies_as

RULES: dict[str, dict[str, Any]] = {
    "predictive": {"full_warm_up_rounds": 2},
    "selective": {
        "topk_ratio": 0.1,
        "select_interval": 4,
        "update_interval": 2,
        "overlap_step": True,
        "full_warm_up_rounds": 2,
    },
}
"""Fields of the ``zenflow`` section with which both rules overlap."""


def zenflow_config(
    stage: int,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: int = 1,
    lr: float = 1e-3,
    **zenflow: Any,
) -> dict[str, Any]:
    """A config with the predictive rule; `zenflow` are fields of its section.

    Steps overlap as soon as they can. By default that is after 10 steps, which is more than most
    tests take. Nothing is chosen by measuring: how busy a machine is must change no bit.
    """
    config = base_config(stage, dtype, accumulation=accumulation)
    config["optimizer"]["params"]["lr"] = lr
    config["zero_optimization"]["zenflow"] = {
        "full_warm_up_rounds": 1,
        "autotune": False,
        **zenflow,
    }
    # test ranks share few cores with other tests
    config["zero_optimization"]["core_binding"] = {"enabled": False}
    if stage == 3:  # else all parameters of small models would be persistent, in one sub-group
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 4000,
        }
    return config


def small_chunks() -> AbstractContextManager[Any]:
    """Inside, partitions of small models have several chunks."""
    return patch.object(places, "CHUNK_NUMEL", 512)


def offload_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same run with DeepSpeed's own ZeRO-Offload."""
    config = copy.deepcopy(config)
    del config["zero_optimization"]["zenflow"], config["zero_optimization"]["core_binding"]
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return config


def make_engine(
    config: dict[str, Any],
    *,
    extended: bool = True,
    model: Callable[[], torch.nn.Module] = OddModel,
    groups: Callable[[torch.nn.Module], Any] | None = None,
    **how: Any,
) -> Any:
    """An engine around `model()`, the same weights every time and on every rank."""
    torch.manual_seed(1234)
    module = model()
    initialize = deepspeed_ext.initialize if extended else deepspeed.initialize
    parameters = groups(module) if groups else [p for p in module.parameters() if p.requires_grad]
    config = copy.deepcopy(config)
    with copies_as(config.get("zero_optimization", {}).get("zenflow") or {}):
        engine, *_ = initialize(model=module, model_parameters=parameters, config=config, **how)
    return engine


def refusal(config: dict[str, Any], make: Callable[..., Any] = make_engine, **how: Any) -> str:
    """Why `make` refuses a config; "accepted" if it does not."""
    try:
        make(config, **how).destroy()
    except (ConfigError, ZeRORuntimeException) as error:
        return str(error)
    return "accepted"


def train(engine: Any, data: Iterable[torch.Tensor], times: float = 1.0) -> list[float]:
    """One micro-step a batch, with the loss times `times`; returns the losses.

    All data goes up before the first step, and all losses come down after the last: both wait for
    the device, which would hide that a step does not.
    """
    losses = []
    for batch in [batch.to(get_accelerator().current_device_name()) for batch in data]:
        loss = engine(batch) * times
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def distance(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
) -> float:
    """Of the weights of two trained models, over the distance that the expected ones have moved
    from the start (all L2)."""
    apart = sum(float((actual[name] - value).square().sum()) for name, value in expected.items())
    moved = sum(float((value - start[name]).square().sum()) for name, value in expected.items())
    return (apart / moved) ** 0.5


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The module's full weights by name, gathered at stage 3. At others, those that a step has left
    on their way are complete once a state dict has been made."""
    if engine.zero_optimization_stage() < 3:
        engine.module.state_dict()
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().cpu().clone()
    return found


def full_masters_of(engine: Any) -> list[torch.Tensor]:
    """fp32 values of what is trained; unlike a partition they have no padding, which stage 3 leaves
    uninitialised."""
    if hasattr(engine.optimizer, "host_optimizer"):
        engine.optimizer.host_optimizer.state.drain()
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return [safe_get_full_fp32_param(p).float().cpu().clone() for p in trained]


def partitions_of(engine: Any) -> list[torch.Tensor]:
    """The optimizer's fp32 partitions on this rank."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return engine.optimizer.single_partition_of_fp32_groups


def masters_of(engine: Any) -> list[torch.Tensor]:
    """This rank's fp32 partitions, every update that has been handed over included."""
    if hasattr(engine.optimizer, "host_optimizer"):
        engine.optimizer.host_optimizer.state.drain()
    return [p.detach().float().cpu().clone() for p in partitions_of(engine)]


@dataclass
class Outcome:
    """What a run left behind."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: list[torch.Tensor] = field(default_factory=list)


def run(config: dict[str, Any], steps: int, *, rank: int, **how: Any) -> Outcome:
    """Build an engine, train `steps` micro-steps on this rank's data, destroy it."""
    engine = make_engine(config, **how)
    losses = train(engine, batches(steps, rank))
    outcome = Outcome(losses, weights_of(engine), masters_of(engine))
    engine.destroy()
    return outcome
