"""Estimates updates that are still in flight, by elementwise arithmetic on a flat partition, on any
device.

The formulas are written out only here. Symbols are those of the glossary in
`deepspeed_ext.zenflow`; b1, b2 are Adam's betas, wd is the weight decay.

Let p, m, v be the worker's newest result, after update t. S gradients g_1 .. g_S follow (S is the
interval), which Adam will use in updates t_j = t + j. A gradient enters m with weight 1 - b1 and
then decays by b1 per update. After n updates it has moved the weights by
``lr q_j (1 - b1) E(t_j, n)``. The momentum already in m moves them by ``lr M(t, n) m / d``::

    E(t, n) = sum_(l=0..n-1) b1^l / (1 - b1^(t+l))
    M(t, n) = sum_(i=1..n) b1^i / (1 - b1^(t+i))

    d = sqrt(v / (1 - b2^t)) + eps            d_b = d with the mean of v over the element's block
    q_j = clamp(c_j g_j / d_b, -K, K)         K = CLAMP = 4.5

q uses d_b because the accelerator knows only the block means of v. It is clamped because a mean
says little about an element that dominates its block, and no Adam update is much larger than K lr.
v is assumed constant over these few updates.

At the end of an interval the weights must serve the next S steps, whose result again arrives one
interval later. So they are extrapolated to the mean position of the next interval: S + k updates
ahead, averaged over k = 0 .. S - 1::

    y = (1 - S lr wd) p - lr mean_k M(t, S + k) m / d                      (AdamW)
    y = p - lr mean_k M(t, S + k) m / d - A clamp(wd p / d_b, -K, K)       (Adam with L2)

    A = sum_j a_j        a_j = lr (1 - b1) mean_k E(t_j, S - j + 1 + k)
    D = sum_j a_j q_j
    W = dither(y - D)

Without bias correction, update t divides m by ``sqrt(v) + eps`` = s_t d with s_t = sqrt(1 - b2^t).
So every 1 / (1 - b1^(t+l)) above becomes 1 / s_(t+l), and the epsilon in d becomes eps / s_t; d
stays about constant while v grows from zero. The worker knows only s_t d, so its factors of ``1/d``
are multiplied by s_t.

dither() rounds stochastically to the dtype of the weights (`kernels.definition`): one gradient's
effect is mostly less than half a step of bfloat16, and rounding to nearest would lose it.

The L2 term: under Adam with L2 regularization, wd p is added to each of the S gradients in flight,
and is known beforehand. It is estimated like a gradient, with d_b and a clamp, because gradient and
L2 term may cancel: the element's own d is then close to zero, and dividing by it would explode.

The worker computes y in the same pass as the update. D is accumulated on the accelerator as the
gradients arrive. Within an interval, after step j < S, the weights also move at once, by
``lr (1 - b1) q_j mean_(i=1..S-j) E(t_j, i)``. For S = 1 and AdamW, y = (1 - lr wd) p - lr b1/(1 -
b1^(t+1)) m / d and W = dither(y - lr (1 - b1)/(1 - b1^(t+1)) q): the exact update, except for the
block mean of v, its age of one update, the clamp and two roundings. None of this ever enters p, m
or v, so errors do not accumulate.
"""

from __future__ import annotations

import math

import torch

from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.kernels import CLAMP
from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish

__all__ = ["Estimator", "drift_coefficient", "move_coefficient", "publish_ahead"]


def _without_correction(step: AdamStep, t: int) -> float:
    """s_t of the module docstring."""
    return math.sqrt(1.0 - step.beta2**t)


def _gain(step: AdamStep, t: int) -> float:
    """The factor of m / d in update t."""
    return 1.0 / (1.0 - step.beta1**t if step.bias_correction else _without_correction(step, t))


def _effect(step: AdamStep, t: int, updates: int) -> float:
    """E(t, n) of the module docstring."""
    return sum(step.beta1**i * _gain(step, t + i) for i in range(updates))


def _momentum(step: AdamStep, t: int, updates: int) -> float:
    """M(t, n) of the module docstring."""
    return sum(step.beta1**i * _gain(step, t + i) for i in range(1, updates + 1))


def _worker_unit(step: AdamStep) -> float:
    """The worker's denominator in units of d."""
    return 1.0 if step.bias_correction else _without_correction(step, step.step)


def publish_ahead(last: AdamStep, interval: int) -> Publish:
    """How y follows from p, m, v when the next result is `interval` steps away.

    Args:
        last: constants of the newest update.
        interval: S of the module docstring.
    """
    ahead = range(interval)
    momentum = sum(_momentum(last, last.step, interval + k) for k in ahead) / interval
    unit = _worker_unit(last)
    drift = 0.0
    if not last.decoupled and last.weight_decay:
        # The L2 term of the module docstring; the sum is A.
        drift = sum(
            drift_coefficient_of(last, last.step + j, j, interval) for j in range(1, interval + 1)
        )
    return Publish(
        p_factor=1.0 - interval * last.lr * last.weight_decay if last.decoupled else 1.0,
        m_factor=last.lr * momentum * unit,
        l2_factor=drift * last.weight_decay * unit,
        l2_bound=drift * CLAMP,
        bias_correction2_sqrt=last.bias_correction2_sqrt,
        eps=last.eps,
    )


def drift_coefficient_of(step: AdamStep, t: int, position: int, interval: int) -> float:
    """a_j of the module docstring: the coefficient of q in D.

    Args:
        t: number of the update that uses the gradient.
        position: j, from 1.
        interval: S.
    """
    ahead = range(interval)
    effect = sum(_effect(step, t, interval - position + 1 + k) for k in ahead) / interval
    return step.lr * (1.0 - step.beta1) * effect


def drift_coefficient(step: AdamStep, position: int, interval: int) -> float:
    """`drift_coefficient_of` for the gradient of the update ``step.step``."""
    return drift_coefficient_of(step, step.step, position, interval)


def move_coefficient(step: AdamStep, position: int, interval: int) -> float:
    """Coefficient of q by which the weights move at once, after step `position` (from 1) <
    `interval`."""
    left = range(1, interval - position + 1)
    effect = sum(_effect(step, step.step, i) for i in left) / len(left)
    return step.lr * (1.0 - step.beta1) * effect


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
        d = kernels.root(block_means).mul_(1.0 / bias_correction2_sqrt).add_(eps)
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
    def move(
        self,
        weights: torch.Tensor,
        drift: torch.Tensor,
        grad: torch.Tensor,
        grad_scale: float,
        move_coefficient: float,
        drift_coefficient: float,
    ) -> None:
        """Compute ``weights -= move_coefficient q(grad)`` and
        ``drift += drift_coefficient q(grad)``, in place.

        Computed in fp32 on grad's device, and dithered.

        Args:
            weights: 1-D [n], any float dtype, any device.
            drift: D, 1-D [n], any float dtype, on grad's device.
            grad: 1-D [n], any float dtype.
            grad_scale: c.
            move_coefficient: see the function of this name.
            drift_coefficient: see the function of this name.
        """
        numbers = (grad_scale, move_coefficient, drift_coefficient)
        kernels.move(weights, drift, grad, self.inverse, *numbers, self._block_size)

    @torch.no_grad()
    def predict(
        self,
        weights: torch.Tensor,
        published: torch.Tensor,
        drift: torch.Tensor | None,
        grad: torch.Tensor,
        grad_scale: float,
        coefficient: float,
    ) -> None:
        """Compute ``weights = dither(published - drift - coefficient q(grad))``, in fp32 on grad's
        device.

        Args:
            weights, published: 1-D [n], any float dtype, any device; `published` is copied to
                grad's device in parts.
            drift: D, 1-D [n], on grad's device; None at interval 1.
            grad: 1-D [n], any float dtype.
            grad_scale: c.
            coefficient: factor of q.
        """
        numbers = (grad_scale, coefficient)
        kernels.predict(weights, published, drift, grad, self.inverse, *numbers, self._block_size)
