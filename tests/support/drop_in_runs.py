"""Trains with one setting on a rank: with ZeRO-Offload, and with ZenFlow under both rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from torch import nn

from tests.support.compare import allow_fp16
from tests.support.drop_in import ACCEPTED, REFUSED_UNTRIED, Row, merged
from tests.support.models import OddModel, batches
from tests.support.same import first_difference
from tests.support.zenflow import (
    distance,
    full_masters_of,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

__all__ = ["RULES", "RunError", "apart", "config_of", "tried"]

STEPS = 6
RULES = {
    "predictive": {},
    "selective": {"topk_ratio": 0.2, "update_interval": 1, "select_interval": 4},
}
"""Fields with which a rule defers nothing if ``overlap_step`` is false."""


class RunError(Exception):
    """What `initialize` or training raised."""


class Even(OddModel):
    """With sizes that ZeRO++ can quantize: multiples of 8 on each rank."""

    def __init__(self) -> None:
        super().__init__(width=32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)


class Frozen(Even):
    """With a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": OddModel, "frozen": Frozen, "even": Even}


class Quantizer:
    """ZeRO++'s operator for int8 weights, which DeepSpeed has for CUDA only, in torch."""

    Symmetric = 0

    @staticmethod
    def quantize(
        values: torch.Tensor, groups: int, bits: int, kind: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.float().view(groups, -1)
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return (rows / scales).round().to(torch.int8).view(values.shape), scales.view(-1)

    @staticmethod
    def dequantize(
        values: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        return (values.view(groups, -1).float() * scales.view(groups, 1)).half().view(values.shape)


def optimizer_of(name: str) -> Any:
    """What the user passes to `initialize`: None, or a function of the parameters."""
    kinds: dict[str, dict[str, Any]] = {
        "DeepSpeedCPUAdam": {},
        "DeepSpeedCPUAdam with 16-bit states": {"fp32_optimizer_states": False},
    }
    return (
        (lambda params: DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=0.1, **kinds[name]))
        if name
        else None
    )


def config_of(row: Row, stage: int, rule: str | None, **zenflow: Any) -> dict[str, Any]:
    """The config of ZeRO-Offload with the row's changes; with `rule`, a ``zenflow`` section is
    added."""
    base = zenflow_config(stage, torch.float32)
    cores = base["zero_optimization"]["core_binding"]
    config = merged(offload_config(base), row.changes)
    if row.optimizer:
        del config["optimizer"]
    if rule is not None:
        section = {"overlap_step": False, **RULES[rule], **zenflow}
        config["zero_optimization"] |= {"zenflow": section, "core_binding": cores}
    return config


def trained(row: Row, config: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Train, and with a `folder` save after half of the steps and go on in a new engine; the final
    state.

    Raises:
        RunError: with the error's type and text.
    """
    extended = "zenflow" in config["zero_optimization"]
    try:
        engine = _engine(row, config, extended)
    except Exception as error:
        raise RunError(f"{type(error).__name__}: {error}") from None
    if row.outcome == ACCEPTED:
        engine.destroy()
        return {}
    accumulation = engine.gradient_accumulation_steps()
    data = batches(STEPS * accumulation, dist.get_rank())
    half = len(data) // 2
    losses = train(engine, data[:half])
    if folder:
        engine.save_checkpoint(folder, tag="half")
        engine.destroy()
        engine = _engine(row, config, extended)
        engine.load_checkpoint(folder, tag="half")
    losses += train(engine, data[half:])
    found: dict[str, Any] = {"losses": losses, "weights": weights_of(engine)}
    if extended:
        found["masters"] = full_masters_of(engine)
    engine.destroy()
    return found


def _engine(row: Row, config: dict[str, Any], extended: bool) -> Any:
    how = {
        "extended": extended,
        "model": MODELS[row.model],
        "optimizer": optimizer_of(row.optimizer),
    }
    engine = make_engine(copy.deepcopy(config), **how)
    if row.before == "compile":
        engine.compile()
    return engine


def tried(row: Row, stage: int, folder: str) -> dict[str, Any]:
    """What becomes of a row's setting: for ZeRO-Offload (None) and each rule, the final state, or
    the error.

    With `row.resumes`, ZenFlow's resumed run is compared to the bit with one that is not resumed;
    what differs is kept under "resumed".
    """
    allow_fp16()
    with patch.object(
        CUDAQuantizer, "quantizer_cuda_module", Quantizer() if row.before == "quantizer" else None
    ):
        found: dict[str, Any] = {}
        without = replace(row, changes=row.changes if row.instead is None else row.instead)
        for rule in (None, *row.rules):
            if rule is None and row.outcome == REFUSED_UNTRIED:
                found["offload"] = ""
                continue
            config = config_of(without if rule is None else row, stage, rule)
            try:
                found[rule or "offload"] = trained(row, config)
            except RunError as error:
                found[rule or "offload"] = str(error)
            else:
                if rule and row.resumes:
                    resumed = trained(row, config, f"{folder}/{rule}")
                    found["resumed"] = found.get("resumed", "") + first_difference(
                        found[rule], resumed, rule
                    )
    return found | {"start": _start(row)}


def _start(row: Row) -> dict[str, torch.Tensor]:
    """The weights before training."""
    torch.manual_seed(1234)
    return {name: param.detach().clone() for name, param in MODELS[row.model]().named_parameters()}


def apart(
    expected: dict[str, Any], actual: dict[str, Any], start: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Two runs' largest relative distance of a loss, and the distance of their weights over that
    moved (L2)."""
    losses = max(
        abs(one - other) / abs(one)
        for one, other in zip(expected["losses"], actual["losses"], strict=True)
    )
    return losses, distance(expected["weights"], actual["weights"], start)
