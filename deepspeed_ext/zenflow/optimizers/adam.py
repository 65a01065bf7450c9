"""Adam and AdamW of torch and DeepSpeed. The formulas of their update are in
`worker.kernel.adam_pass`, those of the estimate of an update in flight only here.

Symbols are those of the glossary in `deepspeed_ext.zenflow`; b1, b2 are Adam's betas, wd is the
weight decay.

Let p, m, v be the worker's newest result, after update t. A gradient g follows, which Adam will use
in update t + 1. It enters m with weight 1 - b1::

    N(t) = 1 / (1 - b1^t)                     the bias correction of m

    d = sqrt(v / (1 - b2^t)) + eps            d_b = d with the mean of v over the element's block
    q = clamp(c g / d_b, -K, K)               K = CLAMP = 4.5

q uses d_b because the accelerator knows only the block means of v. It is clamped because a mean
says little about an element that dominates its block, and no Adam update is much larger than K lr.
v is assumed constant over the update. What is known of it before its gradient comes is in y::

    y = (1 - lr wd) p - lr b1 N(t + 1) m / d                       (AdamW)
    y = p - lr b1 N(t + 1) m / d - a clamp(wd p / d_b, -K, K)      (Adam with L2)

    a = lr (1 - b1) N(t + 1)
    W = dither(y - a q)

Without bias correction, update t divides m by ``sqrt(v) + eps`` = s_t d with s_t = sqrt(1 - b2^t).
So N(t) becomes 1 / s_t, and the epsilon in d becomes eps / s_t; d stays about constant while v
grows from zero. The worker knows only s_t d, so its factors of ``1/d`` are multiplied by s_t.

dither() rounds stochastically to the dtype of the weights (`worker.kernel.definition`): one
gradient's effect is mostly less than half a step of bfloat16, and rounding to nearest would lose
it.

The L2 term: under Adam with L2 regularization, wd p is added to the gradient in flight, and is
known beforehand. It is estimated like a gradient, with d_b and a clamp, because gradient and L2
term may cancel: the element's own d is then close to zero, and dividing by it would explode.

The worker computes y in the same pass as the update. For AdamW, W is the exact update, except for
the block mean of v, its age of one update, the clamp and two roundings. None of this ever enters p,
m or v, so errors do not accumulate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.definition import CLAMP, root

_DEEPSPEED_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")


class AdamKind(OptimizerKind):
    """The user's Adam or AdamW.

    Raises:
        ConfigError: it overrides `step`, or keeps state that the worker does not have.
    """

    layout = ADAM_STATE

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ZenFlowConfig | None = None
    ) -> None:
        super().__init__(optimizer, config)
        name = type(optimizer).__name__
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
        # unless a parameter group says otherwise
        self.is_decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(
            optimizer.defaults.get("decoupled_weight_decay", False)
            if isinstance(optimizer, torch.optim.Adam)
            else getattr(optimizer, "adam_w_mode", True)
        )

    @classmethod
    def serves(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Adam or AdamW of torch or DeepSpeed, or a subclass of torch's."""
        ours = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        return ours or type(optimizer).__name__ in _DEEPSPEED_ADAMS

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
        """`grad_scale` changes its sign if the group is maximized."""
        beta1, beta2 = group["betas"]
        sign = -1.0 if group.get("maximize") else 1.0
        return AdamStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", self.is_decoupled)),
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

    def known(self, last: AdamStep, per_block: torch.Tensor) -> torch.Tensor:
        """1 / d_b of each block."""
        return inverses(last, per_block)

    @torch.no_grad()
    def predict(
        self,
        known: torch.Tensor,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        step: AdamStep,
        block_size: int,
    ) -> None:
        numbers = step.grad_scale, effect_of(step, step.step)
        launch.predict(weights, published, grad, known, *numbers, block_size)

    def step_rows(
        self,
        state: Sequence[torch.Tensor],
        grad: torch.Tensor,
        weights: torch.Tensor,
        step: AdamStep,
    ) -> None:
        launch.adam_step(state, grad, weights, step)


def _require_two_moments(group: Mapping[str, Any], place: str) -> None:
    if group.get("amsgrad"):
        raise ConfigError(
            "zero_optimization.zenflow keeps two moments per weight, but amsgrad=True "
            f"({place}) needs a third, which DeepSpeed's own CPU optimizer does not have either: "
            "set it to False"
        )


def held_adam(
    theirs: type[torch.optim.Optimizer],
    parameters: Any,
    *,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """Torch's Adam or AdamW with the arguments and defaults of ``DeepSpeedCPUAdam``, `theirs`.

    Args:
        bias_correction: parameter groups store False, and nothing otherwise.
        fp32_optimizer_states: ignored: without it, the state has the dtype of the masters, which
            is fp32 here anyway.
    """
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizer = kind(parameters, weight_decay=weight_decay, **others)
    if not bias_correction:
        for fields in (optimizer.defaults, *optimizer.param_groups):
            fields.setdefault("bias_correction", False)
    return optimizer


# -- the estimate ----------------------------------------------------------------------------------


def _without_correction(step: AdamStep, t: int) -> float:
    """s_t of the module docstring."""
    return math.sqrt(1.0 - step.beta2**t)


def _gain(step: AdamStep, t: int) -> float:
    """The factor of m / d in update t."""
    return 1.0 / (1.0 - step.beta1**t if step.bias_correction else _without_correction(step, t))


def _worker_unit(step: AdamStep) -> float:
    """The worker's denominator in units of d."""
    return 1.0 if step.bias_correction else _without_correction(step, step.step)


def publish_ahead(last: AdamStep) -> Publish:
    """How y follows from p, m, v; `last` are the constants of the newest update."""
    coming, unit = last.step + 1, _worker_unit(last)
    effect = 0.0
    if not last.decoupled and last.weight_decay:  # the L2 term of the module docstring
        effect = effect_of(last, coming)
    return Publish(
        p_factor=1.0 - last.lr * last.weight_decay if last.decoupled else 1.0,
        m_factor=last.lr * (last.beta1 * _gain(last, coming)) * unit,
        l2_factor=effect * last.weight_decay * unit,
        l2_bound=effect * CLAMP,
        bias_correction2_sqrt=last.bias_correction2_sqrt,
        eps=last.eps,
    )


def effect_of(step: AdamStep, t: int) -> float:
    """a of the module docstring: the coefficient of q, for the gradient of update `t`."""
    return step.lr * (1.0 - step.beta1) * _gain(step, t)


def inverses(last: AdamStep, block_means: torch.Tensor) -> torch.Tensor:
    """1 / d_b of each block after the update `last`, of the same shape.

    Args:
        block_means: mean of v over each block, 1-D fp32 [ceil(n / block_size)], on the device of
            the gradients.
    """
    root_of_correction, eps = last.bias_correction2_sqrt, last.eps
    if not last.bias_correction:
        root_of_correction = _worker_unit(last)
        eps /= root_of_correction
    # Multiply by the inverse: torch turns a division by a number into that on some devices, but not
    # on the CPU.
    return root(block_means).mul_(1.0 / root_of_correction).add_(eps).reciprocal_()
