"""Estimates updates that are still in flight, by elementwise arithmetic on a flat partition, on any
device.

The formulas are written out only here. Symbols are those of the glossary in
`deepspeed_ext.zenflow`; b1, b2 are Adam's betas, wd is the weight decay.

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

import math

import torch

from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.definition import CLAMP
from deepspeed_ext.zenflow.worker.kernel.roots import root

__all__ = ["Estimator", "effect_of", "publish_ahead"]


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


class Estimator:
    """Computes weights from the published y and the gradients in flight.

    Runs as one kernel if all arrays are on the accelerator, otherwise as torch operations in chunks
    (see `deepspeed_ext.zenflow.kernels`), with bitwise the same results.

    Attributes:
        inverse: 1 / d_b of each block, 1-D fp32 [ceil(n / block_size)]; the estimator's only state.

    Args:
        block_means: mean of v over each block, 1-D fp32 [ceil(n / block_size)], on the device of
            the gradients.
        bias_correction2_sqrt: sqrt(1 - beta2^t) of the update to which the means belong.
        eps: epsilon of d.
    """

    def __init__(
        self, block_means: torch.Tensor, block_size: int, bias_correction2_sqrt: float, eps: float
    ) -> None:
        self._block_size = block_size
        # Multiply by the inverse: torch turns a division by a number into that on some devices, but
        # not on the CPU.
        d = root(block_means).mul_(1.0 / bias_correction2_sqrt).add_(eps)
        self.inverse = d.reciprocal_()

    @classmethod
    def after(cls, last: AdamStep, block_means: torch.Tensor, block_size: int) -> Estimator:
        """The estimator from the block means after the update `last`."""
        if last.bias_correction:
            return cls(block_means, block_size, last.bias_correction2_sqrt, last.eps)
        unit = _worker_unit(last)
        return cls(block_means, block_size, unit, last.eps / unit)

    @classmethod
    def remembering(cls, inverse: torch.Tensor, block_size: int) -> Estimator:
        """Rebuild an estimator from its `inverse`."""
        estimator = cls.__new__(cls)
        estimator._block_size, estimator.inverse = block_size, inverse
        return estimator

    def of(self, begin: int, end: int) -> Estimator:
        """The estimator of the elements from `begin`, where a block begins, to `end` (exclusive),
        where one ends."""
        blocks = slice(begin // self._block_size, -(-end // self._block_size))
        return self.remembering(self.inverse[blocks], self._block_size)

    @property
    def kept(self) -> torch.Tensor:
        """`inverse`."""
        return self.inverse

    @torch.no_grad()
    def predict(
        self,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        grad_scale: float,
        coefficient: float,
    ) -> None:
        """Compute ``weights = dither(published - coefficient q(grad))``, in fp32 on grad's
        device.

        Args:
            weights, published: 1-D [n], any float dtype, any device; `published` is copied to
                grad's device in parts.
            grad: 1-D [n], any float dtype.
            grad_scale: c.
            coefficient: factor of q.
        """
        numbers = (grad_scale, coefficient)
        kernels.predict(weights, published, grad, self.inverse, *numbers, self._block_size)
