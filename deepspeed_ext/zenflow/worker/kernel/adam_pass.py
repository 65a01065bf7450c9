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
bits, the step rounds them (Note: [rounded moments]) before it computes d and p. The order of
roundings is the compiler's in the native library, for its speed, that of torch's AdamW in
`take_host_step`, and that of `take_step` on an accelerator.

After it, with that step's d and the values of `Publish`::

    block_means[b] = mean of v over block b, and d_b is d with it
    y = p_factor p - m_factor m / d - clamp(l2_factor p / d_b, -l2_bound, l2_bound)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deepspeed_ext.zenflow.worker.kernel.passes import (
    ROUNDED_CHUNK_NUMEL,
    Passes,
    StateLayout,
    chunk_of,
    single,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
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
    def bias_correction1(self) -> float:
        """1 - beta1^t, or 1."""
        return 1.0 - self.beta1**self.step if self.bias_correction else 1.0

    @property
    def bias_correction2_sqrt(self) -> float:
        """sqrt(1 - beta2^t), or 1."""
        return math.sqrt(1.0 - self.beta2**self.step) if self.bias_correction else 1.0

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
            single(-math.expm1(self.step * math.log(beta)))
            if beta and self.bias_correction
            else 1.0
            for beta in (self.beta1, self.beta2)
        )
        return first, single(math.sqrt(second))


@dataclass(frozen=True)
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
    def exact(cls, bias_correction2_sqrt: float, eps: float) -> Publish:
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
            of_step = (
                *(1.0 - step.beta1, step.beta2, 1.0 - step.beta2, step.eps, step.decay, step.l2),
                *(step.lr / step.bias_correction1, 1.0 / step.bias_correction2_sqrt),
                step.grad_scale,
            )
        return (
            *of_step,
            *(publish.p_factor, publish.m_factor, publish.l2_factor, publish.l2_bound),
            *(1.0 / publish.bias_correction2_sqrt, publish.eps),
        )

    @staticmethod
    def take_step(
        state: Sequence[Tensor], grad: Tensor, step: AdamStep, block_size: int, first: int = 0
    ) -> None:
        """As in the base class, a chunk at a time, on any device; each operation rounds once
        (`definition`). Moments of 16 or 8 bits are rounded before the update, with the random
        number of each element's place in its partition."""
        import torch

        from deepspeed_ext.zenflow.worker.kernel.definition import chunk_numel, loaded, root, store

        numel, fp32 = grad.numel(), partial(torch.empty, dtype=torch.float32, device=grad.device)
        most = chunk_numel(grad.device, block_size)
        if state[1].dtype != torch.float32:
            most = min(most, chunk_of(ROUNDED_CHUNK_NUMEL, block_size))
        with torch.no_grad():
            of_m, of_v = (fp32(1).fill_(value) for value in step.corrections)
            temporaries = fp32(2, min(most, numel))
            for begin in range(0, numel, most):
                end = min(begin + most, numel)
                p, *stored = (array[begin:end] for array in state[:3])
                blocks = slice(begin // block_size, -(-end // block_size))
                scales = [array[blocks] for array in state[3:]]
                moments = m, v = loaded(stored, scales, block_size)
                g, other = (each[: end - begin] for each in temporaries)
                g.copy_(grad[begin:end]).mul_(step.grad_scale)
                if step.l2:
                    g.add_(torch.mul(p, step.l2, out=other))
                m.mul_(step.beta1).add_(torch.mul(g, 1.0 - step.beta1, out=other))
                v.mul_(step.beta2).add_(torch.mul(g, 1.0 - step.beta2, out=other).mul_(g))
                store(moments, stored, scales, block_size, (step.step, first + begin))
                denominator = root(v, out=other).div_(of_v).add_(step.eps)
                change = torch.div(m, of_m, out=g).mul_(-step.lr).div_(denominator)
                if step.decay != 1.0:
                    p.mul_(step.decay)
                p.add_(change)

    @classmethod
    def take_host_step(
        cls, state: Sequence[Tensor], grad: Tensor, step: AdamStep, block_size: int, first: int
    ) -> None:
        """As in the base class, by the operations of ``torch.optim.AdamW``, so to its bits."""
        from deepspeed_ext.zenflow.worker.kernel.definition import loaded, store

        p, *stored = state[:3]
        moments = m, v = loaded(stored, state[3:], block_size)
        g = grad.float() * step.grad_scale
        if step.decoupled:
            p.mul_(1.0 - step.lr * step.weight_decay)
        elif step.weight_decay:
            g.add_(p, alpha=step.weight_decay)
        m.lerp_(g, 1.0 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1.0 - step.beta2)
        store(moments, stored, state[3:], block_size, (step.step, first))
        denominator = v.sqrt().div_(step.bias_correction2_sqrt).add_(step.eps)
        p.addcdiv_(m, denominator, value=-step.lr / step.bias_correction1)

    @staticmethod
    def publish(
        publish: Publish,
        state: Sequence[Tensor],
        block_size: int,
        published: Tensor,
        per_block: Tensor | None,
    ) -> None:
        from deepspeed_ext.zenflow.worker.kernel.definition import block_means, loaded

        def denominator(of: Tensor) -> Tensor:
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
