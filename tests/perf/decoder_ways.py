"""The ways to train a decoder that are compared: plain ZeRO, ours, and rivals, each as its
documentation has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    """DeepSpeed's engine, or ours; with accumulation, the sequences of a step are divided among its
    micro-steps."""

    def __init__(self, model: nn.Module, config: dict[str, Any], extended: bool) -> None:
        self._micro_steps = config.get("gradient_accumulation_steps", 1)
        self._measures = extended and "zenflow" in config["zero_optimization"]
        self.engine = sides.start(model, config, extended)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for micro_batch in tokens.chunk(self._micro_steps):
            losses.append(self.engine(micro_batch))
            self.engine.backward(losses[-1])
            self.engine.step()
        return torch.stack([loss.detach() for loss in losses]).mean()

    def measurements(self) -> dict[str, float]:
        return dict(self.engine.optimizer.measurements()) if self._measures else {}


class TorchLoop:
    """torch alone; it does not clip."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens)
        loss.backward()
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
    needs: str = ""
    says: str = ""

    def at(self, stage: int) -> Way:
        """The same at another stage."""
        return replace(self, name=f"{self.name}, stage {stage}", stage=stage)

    def accumulating(self, micro_steps: int) -> Way:
        """The same with so many micro-steps in a step."""
        other = self.other | {"gradient_accumulation_steps": micro_steps}
        return replace(self, name=f"{self.name}, accumulation {micro_steps}", other=other)

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
    return TorchLoop(model, optimizer)


def _torchao_8_bit(model: nn.Module, way: Way) -> Loop:
    from torchao.optim import AdamW8bit

    return TorchLoop(model, AdamW8bit(model.parameters(), bf16_stochastic_round=True, **ADAMW))


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
    return TorchLoop(model, optimizer)


def _ours(name: str, zenflow: dict[str, Any], **more: Any) -> Way:
    """As a user gets it: it chooses its plan behind ten synchronous steps."""
    zero = {"zenflow": zenflow, **more.pop("zero", {})}
    return Way(name, _engine, zero=zero, extended=True, **({"warm_up": 20} | more))


def _given(name: str, zenflow: dict[str, Any], **more: Any) -> Way:
    """With a plan that is given: nothing is chosen, so the synchronous steps are few."""
    return _ours(name, {"full_warm_up_rounds": 5, **zenflow}, warm_up=10, **more)


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

ZERO = Way("ZeRO, no overflow check", _engine, other=FUSED | UNCHECKED)
OURS = _ours("ours", {})
OURS_NOT_TUNED = _given("ours, not tuned", {"autotune": False})
OURS_EXACT = _ours("ours, exact", {"update_rule": "exact"}).at(3)
ZERO_OFFLOAD = Way("ZeRO-Offload", _engine, zero={"offload_optimizer": OFFLOAD})
OVERLAP = {"offload_optimizer": OFFLOAD, "overlap_comm": True}
ZERO_OFFLOAD_OVERLAP = Way("ZeRO-Offload, overlap_comm", _engine, zero=OVERLAP)
TORCHAO = Way(
    "torchao CPUOffloadOptimizer, full bf16",
    _torchao,
    needs="torchao",
    says="recommended there: no fp32 weights, moments in bf16, no clipping",
)
TORCHAO_8_BIT = Way(
    "torchao AdamW8bit, full bf16",
    _torchao_8_bit,
    needs="torchao",
    says="no offload: 8-bit moments, no fp32 weights, stochastic rounding, no clipping",
)
FSDP2 = Way(
    "FSDP2, CPUOffloadPolicy",
    _fsdp2,
    dtype=torch.float32,
    says="weights on the host, too; no clipping",
)


def _small_card(rule: str, moments: str) -> Way:
    """What a card of 24 GB needs: gradients leave in backward, and all of the optimizer is on the
    host."""
    return _given(
        f"ours, gradients on the host, {rule}, {moments} moments",
        {"gradients_on_host": True, "update_rule": rule, "state_dtype": moments},
        stage=3,
    )


SMALL_CARD = {
    (rule, moments): _small_card(rule, moments)
    for rule in ("exact", "predictive")
    for moments in ("int8", "float32")
}
"""By rule and by the type of the moments."""
MICRO_STEPS = 8

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        ZERO,
        OURS,
        OURS_NOT_TUNED,
        OURS_EXACT,
        ZERO_OFFLOAD,
        ZERO_OFFLOAD_OVERLAP,
        *(way.accumulating(MICRO_STEPS) for way in (ZERO, OURS, OURS_EXACT, ZERO_OFFLOAD)),
        *SMALL_CARD.values(),
        TORCHAO,
        TORCHAO_8_BIT,
        FSDP2,
    )
}
"""By name."""
