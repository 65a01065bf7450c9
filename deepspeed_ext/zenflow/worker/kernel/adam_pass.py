"""Defines the pass of Adam and AdamW: its constants and arithmetic. Plain values; torch only inside
the definition.

Adam and AdamW as in ``torch.optim`` (Kingma and Ba, 2015; Loshchilov and Hutter, 2019). A step
computes, elementwise in fp32::

    g = c * gradient                    (+ weight_decay * p, unless decoupled)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    d = sqrt(v) / sqrt(1 - beta2^t) + eps
    p = (1 - lr weight_decay) p - lr / (1 - beta1^t) m / d      (first factor only if decoupled)

Without bias correction, both 1 - beta^t are 1. A negative c maximizes. If m and v have 16 or 8
bits, the step rounds them (see `rounding`) before it computes d and p. The order of roundings is
the compiler's in the native library, for its speed, and that of `take_step` elsewhere.

After it, with that step's d and the values of `Publish`::

    block_means[b] = mean of v over block b, and d_b is d with it
    y = p_factor p - m_factor m / d - clamp(l2_factor p / d_b, -l2_bound, l2_bound)
"""

import ctypes
import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from deepspeed_ext.zenflow.worker.kernel.passes import (
    ROUNDED_CHUNK_NUMEL,
    Passes,
    StateLayout,
    chunk_of,
    dtype_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["ADAM_STATE", "AdamConstants", "AdamPasses", "AdamStep", "Publish"]


def _single(value: float) -> float:
    """`value` rounded to fp32."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The constants of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW. False: Adam with weight decay as an L2 term in the gradient."""
    step: int
    """Number of this update, from 1 (``t`` of the bias correction)."""
    grad_scale: float
    """``c``: factor of the stored gradient (loss scale and clipping); negative where the gradient
    is maximized."""
    bias_correction: bool = True
    """False: the moments are used as they are."""

    @property
    def _correction_betas(self) -> tuple[float, float]:
        """The betas of the bias corrections; zeros, which make them 1, if there are none."""
        return (self.beta1, self.beta2) if self.bias_correction else (0.0, 0.0)

    @property
    def bias_correction1(self) -> float:
        """1 - beta1^t, or 1."""
        return 1.0 - self._correction_betas[0] ** self.step

    @property
    def bias_correction2_sqrt(self) -> float:
        """sqrt(1 - beta2^t), or 1."""
        return math.sqrt(1.0 - self._correction_betas[1] ** self.step)

    @property
    def l2(self) -> float:
        """Weight decay that is added to the gradient; 0: none."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def decay(self) -> float:
        """Factor of p under decoupled weight decay; 1: none."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def corrections(self) -> tuple[float, float]:
        """Both bias corrections in fp32. By expm1: for small exponents, the subtraction would lose
        digits to cancellation."""
        first, second = (
            _single(-math.expm1(self.step * math.log(beta))) if beta else 1.0
            for beta in self._correction_betas
        )
        return first, _single(math.sqrt(second))


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """The numbers of a step in the order in which the device's kernel takes them. `correction1` and
    `correction2_sqrt` are `AdamStep.corrections`."""

    correction1: float
    correction2_sqrt: float
    grad_scale: float
    lr: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    eps: float
    l2: float
    decay: float

    @classmethod
    def of(cls, step: AdamStep) -> "AdamConstants":
        """The numbers of `step`."""
        betas = step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2
        return cls(
            *step.corrections, step.grad_scale, step.lr, *betas, step.eps, step.l2, step.decay
        )


@dataclass(frozen=True, slots=True)
class Publish:
    """The coefficients that compute y from p, m and v."""

    p_factor: float
    m_factor: float
    l2_factor: float
    l2_bound: float
    """Bound of the term with `l2_factor`: it estimates L2 terms with the block's d and must be
    clamped."""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2^t) of the step after which y is published; 1.0 before the first step or
    without bias correction."""
    eps: float

    @classmethod
    def exact(cls, bias_correction2_sqrt: float, eps: float) -> "Publish":
        """Coefficients that publish p itself."""
        return cls(1.0, 0.0, 0.0, 0.0, bias_correction2_sqrt, eps)


class AdamPasses(Passes):
    """The arithmetic of the module docstring."""

    step_type = AdamStep
    function = "dsext_adam_pass"

    @staticmethod
    def numbers(publish: Publish, step: AdamStep | None) -> tuple[float, ...]:
        of_step = (0.0,) * 9
        if step is not None:
            own = publish.bias_correction2_sqrt, publish.eps
            assert own == (step.bias_correction2_sqrt, step.eps)
            of_step = (
                *(1.0 - step.beta1, step.beta2, 1.0 - step.beta2, step.eps, step.decay, step.l2),
                *(step.lr / step.bias_correction1, 1.0 / step.bias_correction2_sqrt),
                step.grad_scale,
            )
        return *of_step, *astuple(publish)[:4], 1.0 / publish.bias_correction2_sqrt, publish.eps

    @staticmethod
    def take_step(
        state: "Sequence[torch.Tensor]",
        grad: "torch.Tensor",
        step: AdamStep,
        block_size: int,
        first: int = 0,
    ) -> None:
        """As in the base class, a chunk at a time, on any device; each operation rounds once
        (`definition`). Moments of 16 or 8 bits are rounded before the update, with the random
        number of each element's place in its partition."""
        import torch

        from deepspeed_ext.zenflow.worker.kernel.definition import chunk_numel
        from deepspeed_ext.zenflow.worker.kernel.moments import loaded, round_moments, store
        from deepspeed_ext.zenflow.worker.kernel.roots import root

        c, device = AdamConstants.of(step), grad.device
        dtype = dtype_name(state[1].dtype)
        most = chunk_numel(device, block_size)
        if dtype != "float32":
            most = min(most, chunk_of(ROUNDED_CHUNK_NUMEL, block_size))
        with torch.no_grad():
            correction1, correction2_sqrt = (
                torch.full((1,), value, dtype=torch.float32, device=device)
                for value in step.corrections
            )
            size = 2, min(most, grad.numel())
            temporaries = torch.empty(size, dtype=torch.float32, device=device)
            for begin in range(0, grad.numel(), most):
                end = min(begin + most, grad.numel())
                p, *stored = (array[begin:end] for array in state[:3])
                blocks = slice(begin // block_size, -(-end // block_size))
                scales = [array[blocks] for array in state[3:]]
                moments = m, v = loaded(stored, scales, block_size)
                g, other = (each[: end - begin] for each in temporaries)
                g.copy_(grad[begin:end]).mul_(c.grad_scale)
                if c.l2:
                    g.add_(torch.mul(p, c.l2, out=other))
                m.mul_(c.beta1).add_(torch.mul(g, c.weight1, out=other))
                v.mul_(c.beta2).add_(torch.mul(g, c.weight2, out=other).mul_(g))
                round_moments(m, v, dtype, block_size, step.step, first + begin)
                denominator = root(v, out=other).div_(correction2_sqrt).add_(c.eps)
                change = torch.div(m, correction1, out=g).mul_(-c.lr).div_(denominator)
                if c.decay != 1.0:
                    p.mul_(c.decay)
                p.add_(change)
                store(moments, stored, scales, block_size)

    @classmethod
    def take_host_step(
        cls,
        state: "Sequence[torch.Tensor]",
        grad: "torch.Tensor",
        step: AdamStep,
        block_size: int,
        first: int = 0,
    ) -> None:
        """As in the base class, by the operations of ``torch.optim.AdamW``, so to its bits."""
        from deepspeed_ext.zenflow.worker.kernel.moments import loaded, round_moments, store

        p, *stored = state[:3]
        moments = m, v = loaded(stored, state[3:], block_size)
        g = grad.float() * step.grad_scale
        if step.decoupled:
            p.mul_(1.0 - step.lr * step.weight_decay)
        elif step.weight_decay:
            g.add_(p, alpha=step.weight_decay)
        m.lerp_(g, 1.0 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1.0 - step.beta2)
        round_moments(m, v, dtype_name(stored[0].dtype), block_size, step.step, first)
        denominator = v.sqrt().div_(step.bias_correction2_sqrt).add_(step.eps)
        p.addcdiv_(m, denominator, value=-step.lr / step.bias_correction1)
        store(moments, stored, state[3:], block_size)

    @staticmethod
    def publish(
        publish: Publish,
        state: "Sequence[torch.Tensor]",
        block_size: int,
        published: "torch.Tensor",
        per_block: "torch.Tensor | None",
    ) -> None:
        from deepspeed_ext.zenflow.worker.kernel.definition import block_means
        from deepspeed_ext.zenflow.worker.kernel.moments import loaded

        def denominator(of: "torch.Tensor") -> "torch.Tensor":
            return of.sqrt().div_(publish.bias_correction2_sqrt).add_(publish.eps)

        p, (m, v) = state[0], loaded(state[1:3], state[3:], block_size)
        if per_block is not None:
            per_block.copy_(block_means(v, block_size))
        y = p * publish.p_factor
        if publish.m_factor:
            y.sub_((m * publish.m_factor).div_(denominator(v)))
        if publish.l2_factor:
            of_blocks = denominator(block_means(v, block_size))
            of_elements = of_blocks.repeat_interleave(block_size)[: p.numel()]
            l2_term = (p * publish.l2_factor).div_(of_elements)
            y.sub_(l2_term.clamp_(-publish.l2_bound, publish.l2_bound))
        published.copy_(y)


ADAM_STATE = StateLayout(
    "adam", (("m", "exp_avg"), ("v", "exp_avg_sq")), ("block_means", "float32"), AdamPasses
)
