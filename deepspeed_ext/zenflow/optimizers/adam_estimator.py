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

from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.definition import CLAMP, root

__all__ = ["effect_of", "inverses", "publish_ahead"]


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
