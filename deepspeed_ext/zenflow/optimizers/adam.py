"""Adam and AdamW of torch and DeepSpeed. The formulas are in `worker.kernel.adam_pass` and, for the
estimate, in `optimizers.adam_estimator`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.optimizers.adam_estimator import effect_of, inverses, publish_ahead
from deepspeed_ext.zenflow.optimizers.interface import Estimate, HeldBy, OptimizerKind
from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE

__all__ = ["AdamKind", "require_adam"]

_DEEPSPEED_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")


class AdamKind(OptimizerKind):
    """The user's Adam or AdamW.

    Args:
        optimizer, config: see the base class.

    Raises:
        ConfigError: see `require_adam`.
    """

    layout = ADAM_STATE

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ZenFlowConfig | None = None
    ) -> None:
        super().__init__(optimizer, config)
        self._decoupled = require_adam(optimizer)

    @classmethod
    def serves(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Adam or AdamW of torch or DeepSpeed, or a subclass of torch's."""
        ours = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        return ours or type(optimizer).__name__ in _DEEPSPEED_ADAMS

    @staticmethod
    def stand_ins() -> dict[str, HeldBy]:
        return {"adam.DeepSpeedCPUAdam": _held}

    def _require_group(self, group: Mapping[str, Any], place: str, *, predicts: bool) -> None:
        _require_two_moments(group, place)
        super()._require_group(group, place, predicts=predicts)
        beta1, beta2 = map(float, group["betas"])
        place = f"{place} has betas=({beta1:g}, {beta2:g})"
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ConfigError(f"{place}, but each must be at least 0 and below 1: change them")
        if predicts and 2.0 * beta2 < beta1**2:
            raise ConfigError(
                f"{place}: v forgets gradients so much faster than m that m / sqrt(v) has no "
                "useful bound, and zenflow's predicted weights need one. Raise beta2 to at "
                'least beta1^2 / 2, or set "zenflow": {"overlap_step": false}, which predicts '
                "nothing"
            )

    def constants(self, group: Mapping[str, Any], number: int, grad_scale: float) -> AdamStep:
        """As in the base class; `grad_scale` changes its sign if the group is maximized."""
        beta1, beta2 = group["betas"]
        sign = -1.0 if group.get("maximize") else 1.0
        return AdamStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
            step=number,
            grad_scale=sign * grad_scale,
            bias_correction=bool(group.get("bias_correction", True)),
        )

    def step_value(self, updates: int) -> torch.Tensor | int:
        """An int, or a 0-D fp32 CPU tensor."""
        if type(self.optimizer).__name__ in _DEEPSPEED_ADAMS:
            return updates
        return torch.tensor(float(updates), dtype=torch.float32, device="cpu")

    def exact(self, last: AdamStep) -> Publish:
        return Publish.exact(last.bias_correction2_sqrt, last.eps)

    def ahead(self, last: AdamStep) -> Publish:
        return publish_ahead(last)

    def estimate(self, last: AdamStep, per_block: torch.Tensor, block_size: int) -> Estimate:
        """It remembers 1 / d_b of each block."""
        return self.remembered(inverses(last, per_block), block_size)

    @torch.no_grad()
    def predict(
        self,
        estimate: Estimate,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        step: AdamStep,
    ) -> None:
        numbers = step.grad_scale, effect_of(step, step.step)
        kernels.predict(weights, published, grad, estimate.kept, *numbers, estimate.block_size)

    def step_rows(
        self,
        state: Sequence[torch.Tensor],
        grad: torch.Tensor,
        weights: torch.Tensor,
        step: AdamStep,
    ) -> None:
        kernels.adam_step(state, grad, weights, step)


def require_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Check the user's Adam or AdamW; return whether weight decay is decoupled by default.

    Raises:
        ConfigError: it overrides `step`, or keeps state that the worker does not have.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.AdamW):
        decoupled = True
    elif isinstance(optimizer, torch.optim.Adam):
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", False))
    else:
        decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    # without the wrappers of torch's profiler
    steps = {inspect.unwrap(adam.step) for adam in (torch.optim.Adam, torch.optim.AdamW)}
    if name not in _DEEPSPEED_ADAMS and inspect.unwrap(type(optimizer).step) not in steps:
        raise ConfigError(
            "zero_optimization.zenflow updates weights as torch's Adam and AdamW do, "
            f"but {name} has its own step(), which would never run: "
            "use Adam or AdamW, or remove the zenflow section"
        )
    for index, group in enumerate(optimizer.param_groups):
        _require_two_moments(group, f"parameter group {index} of {name}")
    return decoupled


def _require_two_moments(group: Mapping[str, Any], place: str) -> None:
    if group.get("amsgrad"):
        raise ConfigError(
            "zero_optimization.zenflow keeps two moments per weight, but amsgrad=True "
            f"({place}) needs a third, which DeepSpeed's own CPU optimizer does not have either: "
            "set it to False"
        )


def _held(
    theirs: type[torch.optim.Optimizer],
    parameters: Any,
    *,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """Torch's Adam or AdamW with the arguments and defaults of ``DeepSpeedCPUAdam``.

    Args:
        theirs: that class.
        parameters, weight_decay, adamw_mode, others: as there.
        bias_correction: as there; parameter groups store False, and nothing otherwise.
        fp32_optimizer_states: ignored: without it, the state has the dtype of the masters, which
            is fp32 here anyway.
    """
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizer = kind(parameters, weight_decay=weight_decay, **others)
    if not bias_correction:
        for fields in (optimizer.defaults, *optimizer.param_groups):
            fields.setdefault("bias_correction", False)
    return optimizer
