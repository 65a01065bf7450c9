"""The ways to train a decoder that are compared: plain ZeRO, ours, and rivals, each as its
documentation has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.perf import sides

__all__ = ["WAYS", "Loop", "Way"]

LR, WEIGHT_DECAY = 1e-4, 0.1
ADAMW: dict[str, Any] = {"lr": LR, "betas": sides.BETAS, "weight_decay": WEIGHT_DECAY}


class Loop(Protocol):
    """What trains on a rank."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One optimizer step on `tokens`, sequences x length, int64; returns the loss, a scalar on
        the device."""

    def measurements(self) -> dict[str, float]:
        """What it has measured itself in the last step that is known; empty if it measures
        nothing."""


class EngineLoop:
    """DeepSpeed's engine, or ours."""

    def __init__(self, model: nn.Module, config: dict[str, Any], extended: bool) -> None:
        self._measures = extended and "zenflow" in config["zero_optimization"]
        self.engine = sides.start(model, config, extended)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def measurements(self) -> dict[str, float]:
        return dict(self.engine.optimizer.measurements()) if self._measures else {}


class TorchLoop:
    """torch alone.

    Args:
        clips: gradients are there after backward, and are clipped.
        autocast: weights are fp32, products bf16.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, clips: bool, autocast: bool = False
    ) -> None:
        self.model, self.optimizer, self.clips = model, optimizer, clips
        device = get_accelerator().device_name()
        self._products = (
            partial(torch.autocast, device, torch.bfloat16) if autocast else nullcontext
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._products():
            loss = self.model(tokens)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), sides.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measurements(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        start: makes the loop around a model that is on the device.
        stage: of ZeRO.
        zero: fields of ``zero_optimization``.
        other: other fields of DeepSpeed's config.
        extended: ours.
        dtype: of the model's weights.
        warm_up: steps before the first that counts: until all choices of a run are made.
        compiled: each layer of the model is compiled.
        needs: a package that is not in every environment.
        says: what a reader must know beside its numbers.
    """

    name: str
    start: Callable[[nn.Module, Way], Loop]
    stage: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    extended: bool = False
    dtype: torch.dtype = torch.bfloat16
    warm_up: int = 3
    compiled: bool = False
    needs: str = ""
    says: str = ""

    def at(self, stage: int) -> Way:
        """The same at another stage."""
        return replace(self, name=f"{self.name}, stage {stage}", stage=stage)

    @property
    def is_engine(self) -> bool:
        """Whether it is a config of DeepSpeed."""
        return self.start is _engine

    @property
    def config(self) -> dict[str, Any]:
        """The config of DeepSpeed, with nothing in it that a user need not write."""
        adam = {**ADAMW, "betas": list(sides.BETAS)}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": sides.CLIP,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.other,
        }


def _engine(model: nn.Module, way: Way) -> Loop:
    return EngineLoop(model, way.config, way.extended)


def _torchao(model: nn.Module, way: Way) -> Loop:
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAMW
    )
    return TorchLoop(model, optimizer, clips=False, autocast=way.dtype == torch.float32)


def _fsdp2(model: nn.Module, way: Way) -> Loop:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_device = get_accelerator().device_name() != "cpu"
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_device),
    }
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return TorchLoop(model, optimizer, clips=False)


def _flash(model: nn.Module, way: Way) -> Loop:
    from flashoptim import FlashAdamW

    return TorchLoop(model, FlashAdamW(model.parameters(), **ADAMW), clips=True)


def _ours(name: str, zenflow: dict[str, Any], **more: Any) -> Way:
    """As a user gets it: it chooses its plan behind ten synchronous steps."""
    zero = {"zenflow": zenflow, **more.pop("zero", {})}
    return Way(name, _engine, zero=zero, extended=True, **({"warm_up": 20} | more))


def _given(name: str, zenflow: dict[str, Any], **more: Any) -> Way:
    """With a plan that is given: nothing is chosen, so the synchronous steps are few."""
    return _ours(name, {"full_warm_up_rounds": 5, **zenflow}, warm_up=10, **more)


def _compiled(way: Way) -> Way:
    return replace(way, name=f"{way.name}, compiled", compiled=True)


OFFLOAD = {"device": "cpu", "pin_memory": True}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
FUSED = {
    "optimizer": {
        "type": "AdamW",
        "params": {**ADAMW, "betas": list(sides.BETAS), "torch_adam": True, "fused": True},
    },
    "zero_allow_untested_optimizer": True,
}
"""torch's fused AdamW, because DeepSpeed's own is compiled with nvcc, which few machines have."""
SUPER_OFFLOAD = {"ratio": 0.8, "super_offload": True, "cpuadam_cores_perc": 0.9}
UPSTREAM_ZENFLOW = sides.UPSTREAM_OVERLAPPED.zenflow

ZERO = Way("ZeRO", _engine, other=FUSED, says="bf16.check_grad_overflow is on by default")
ZERO_UNCHECKED = replace(ZERO, name="ZeRO, no overflow check", other=FUSED | UNCHECKED, says="")
OURS = _ours("ours", {})
OURS_14 = _given("ours, 14/2", {"pt_reserved_cores": 2, "update_interval": 1})
OURS_14_BF16 = _given(
    "ours, 14/2, bf16 moments",
    {"pt_reserved_cores": 2, "state_dtype": "bfloat16"},
)
OURS_INT8 = _ours("ours, 8-bit moments", {"state_dtype": "int8"})
OURS_EXACT = _ours("ours, exact", {"update_rule": "exact"})
ZERO_OFFLOAD = Way("ZeRO-Offload", _engine, zero={"offload_optimizer": OFFLOAD})
SHARES = (0.9, 0.75, 0.5)
OURS_SHARED = tuple(
    _given(
        f"ours, ratio {ratio}",
        {},
        zero={"offload_optimizer": {"device": "cpu", "ratio": ratio}},
    )
    for ratio in SHARES
)


RIVALS = (
    Way(
        "SuperOffload, stage 3",
        _engine,
        stage=3,
        zero={
            "overlap_comm": False,
            "reduce_bucket_size": 4 * 10**8,
            "sub_group_size": 4 * 10**8,
            "offload_optimizer": OFFLOAD | SUPER_OFFLOAD,
        },
        says="as in DeepSpeedExamples; made for Grace-Hopper",
    ),
    Way(
        "DeepSpeed's ZenFlow",
        _engine,
        zero={"offload_optimizer": OFFLOAD, "zenflow": UPSTREAM_ZENFLOW},
        warm_up=8,
        says="nine tenths of the updates come every fourth step",
    ),
    Way(
        "torchao CPUOffloadOptimizer, full bf16",
        _torchao,
        needs="torchao",
        says="recommended there: no fp32 weights, moments in bf16, no clipping",
    ),
    Way(
        "torchao CPUOffloadOptimizer, AMP",
        _torchao,
        dtype=torch.float32,
        needs="torchao",
        says="fp32 weights on the device, no clipping",
    ),
    Way(
        "FSDP2, CPUOffloadPolicy",
        _fsdp2,
        dtype=torch.float32,
        says="weights on the host, too; no clipping",
    ),
    Way(
        "FlashOptim",
        _flash,
        needs="flashoptim",
        says="no offload: 8-bit moments and 24-bit weights on the device",
    ),
)

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        ZERO,
        ZERO_UNCHECKED,
        _compiled(ZERO_UNCHECKED),
        OURS,
        _compiled(OURS),
        OURS_14,
        OURS_14_BF16,
        OURS_INT8,
        OURS_EXACT,
        *OURS_SHARED,
        ZERO_OFFLOAD,
        *(way.at(3) for way in (OURS, OURS_14, OURS_14_BF16, OURS_EXACT, ZERO_OFFLOAD)),
        *RIVALS,
    )
}
"""By name."""
