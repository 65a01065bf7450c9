"""The estimate of updates still in flight: elementwise arithmetic on a flat partition, on any device.

Let the worker's newest result be p, m, v after update t, and let S gradients g_1 .. g_S follow (S the interval), which
AdamW will use in updates t_j = t + j. A gradient enters m with weight 1 - b1 and then fades by b1 an update, so that
after n updates it has moved the weights by ``lr q_j (1 - b1) E(t_j, n)``, and what m holds now moves them by
``lr M(t, n) m / d`` in n updates::

    E(t, n) = sum_(l=0..n-1) b1^l / (1 - b1^(t+l))        M(t, n) = sum_(i=1..n) b1^i / (1 - b1^(t+i))

with d = sqrt(v / (1 - b2^t)) + eps, and q_j = c g_j / d where d uses the mean of v over the element's block (all that
the accelerator knows of v). The second moment is taken as constant over those few updates.

At the end of an interval the weights are to serve the next S steps, whose own result is an interval late again: they
are extrapolated to the mean of the next interval's positions, S + k updates ahead for k = 0 .. S - 1::

    y = (1 - S lr wd) p - lr mean_k M(t, S + k) m/d
    D = sum_j lr (1 - b1) q_j mean_k E(t_j, S - j + 1 + k)
    W = 16bit( y - D )

The worker makes y in one pass with the update; D is collected on the accelerator as the gradients come. Within an
interval, after step j < S, the weights also move at once by ``lr (1 - b1) q_j mean_(i=1..S-j) E(t_j, i)``. For S = 1
this is y = (1 - lr wd) p - lr b1/(1 - b1^(t+1)) m/d and W = 16bit(y - lr (1 - b1)/(1 - b1^(t+1)) q): the exact update
but for the block mean of v. Nothing of this ever enters p, m or v, so errors do not build up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from deepspeed_ext.zenflow.kernel import (
    CLAMP,
    AdamStep,
    Array,
    Estimate,
    NativeEstimate,
    Publish,
    library_path,
)

__all__ = ["Estimator", "drift_coefficient", "move_coefficient", "publish_ahead"]

_CHUNK_NUMEL = {"cpu": 1 << 18}
_ACCELERATOR_CHUNK_NUMEL = 1 << 24
_THREAD_NUMEL = 1 << 15
"""Elements that are worth a thread; torch's own number."""
_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _correction(beta: float, t: int) -> float:
    return 1.0 / (1.0 - beta**t)


def _effect(beta1: float, t: int, updates: int) -> float:
    """E(t, n) of the module's text."""
    return sum(beta1**i * _correction(beta1, t + i) for i in range(updates))


def _momentum(beta1: float, t: int, updates: int) -> float:
    """M(t, n) of the module's text."""
    return sum(beta1**i * _correction(beta1, t + i) for i in range(1, updates + 1))


def publish_ahead(last: AdamStep, interval: int) -> Publish:
    """How y follows from p, m, v after the update `last`, when `interval` steps are in flight until the next result."""
    ahead = range(interval)
    momentum = sum(_momentum(last.beta1, last.step, interval + k) for k in ahead) / interval
    drift = 0.0
    if not last.decoupled and last.weight_decay:
        # The gradients in flight have an L2 term each, known already: weight_decay p. It is estimated as they are, with
        # the block's d and clamped, because the two may cancel, and an element's own d is then next to nothing.
        drift = sum(drift_coefficient_of(last, last.step + j, j, interval) for j in range(1, interval + 1))
    return Publish(
        p_factor=1.0 - interval * last.lr * last.weight_decay if last.decoupled else 1.0,
        m_factor=last.lr * momentum,
        l2_factor=drift * last.weight_decay,
        l2_bound=drift * CLAMP,
        bias_correction2_sqrt=last.bias_correction2_sqrt,
        eps=last.eps,
    )


def drift_coefficient_of(step: AdamStep, t: int, position: int, interval: int) -> float:
    """What q of the gradient of update `t` is multiplied with in D; `position` counts from 1 in the interval."""
    ahead = range(interval)
    effect = sum(_effect(step.beta1, t, interval - position + 1 + k) for k in ahead) / interval
    return step.lr * (1.0 - step.beta1) * effect


def drift_coefficient(step: AdamStep, position: int, interval: int) -> float:
    """`drift_coefficient_of` for the gradient that `step` will use."""
    return drift_coefficient_of(step, step.step, position, interval)


def move_coefficient(step: AdamStep, position: int, interval: int) -> float:
    """What q is multiplied with to move the weights at once, after step `position` < `interval`."""
    left = range(1, interval - position + 1)
    effect = sum(_effect(step.beta1, step.step, i) for i in left) / len(left)
    return step.lr * (1.0 - step.beta1) * effect


@functools.cache
def _native() -> NativeEstimate | None:
    """What does the estimates where everything lies in host memory; None: torch operations do."""
    library = library_path()
    return None if library is None else NativeEstimate(library)


def _array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.numel())


class Estimator:
    """Computes weights from what the worker published and from gradients in flight.

    The torch operations are the definition, and run on accelerators. Where all tensors are contiguous in host memory
    the native kernel does the same in one pass; a result may differ by the rounding of its last bit (only where the
    processor has no fused multiply-add). Neither depends on the number of threads.

    Attributes:
        inverse: 1 / d for each block, 1-D fp32; all that the estimator remembers.

    Args:
        block_means: mean of v over blocks; 1-D fp32, ceil(n / block_size) elements, on the device of the gradients.
        block_size: elements of a block.
        bias_correction2_sqrt: sqrt(1 - beta2^t) of the update that the means belong to.
        eps: Adam's.
    """

    def __init__(self, block_means: torch.Tensor, block_size: int, bias_correction2_sqrt: float, eps: float) -> None:
        self._block_size = block_size
        self.inverse = block_means.sqrt().div_(bias_correction2_sqrt).add_(eps).reciprocal_()

    @classmethod
    def remembering(cls, inverse: torch.Tensor, block_size: int) -> Estimator:
        """The estimator that had this `inverse`."""
        estimator = cls.__new__(cls)
        estimator._block_size, estimator.inverse = block_size, inverse
        return estimator

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
        """``weights -= move_coefficient q(grad)`` and ``drift += drift_coefficient q(grad)``.

        Computed in fp32 on grad's device and rounded once. All 1-D, n elements; `drift` on grad's device.
        """
        if self._estimated(weights, None, drift, grad, grad_scale, move_coefficient, drift_coefficient):
            return
        for part, q in self._normalized(grad, grad_scale):
            weights[part].copy_(torch.add(weights[part].to(q.device), q, alpha=-move_coefficient))
            drift[part].copy_(torch.add(drift[part], q, alpha=drift_coefficient))

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
        """``weights = 16bit(published - drift - coefficient q(grad))``, computed in fp32 on grad's device.

        Args:
            weights, published: 1-D, n elements, any device; `published` is moved part by part.
            drift: D on grad's device, or None (interval 1).
        """
        if self._estimated(weights, published, drift, grad, grad_scale, coefficient, 0.0):
            return
        for part, q in self._normalized(grad, grad_scale):
            arrived = published[part].to(q.device, non_blocking=True)
            if drift is not None:
                arrived = torch.sub(arrived, drift[part].float())
            weights[part].copy_(torch.add(arrived, q, alpha=-coefficient))

    def _estimated(
        self,
        weights: torch.Tensor,
        published: torch.Tensor | None,
        drift: torch.Tensor | None,
        grad: torch.Tensor,
        grad_scale: float,
        weights_coefficient: float,
        drift_coefficient: float,
    ) -> bool:
        """Let the native kernel predict, or move if `published` is None; False if it cannot."""
        tensors = [t for t in (weights, published, drift, grad, self.inverse) if t is not None]
        if not all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in _NATIVE_DTYPES for t in tensors):
            return False
        if (native := _native()) is None:
            return False
        estimate = Estimate(
            grad=_array(grad),
            inverse=_array(self.inverse),
            weights=_array(weights),
            published=None if published is None else _array(published),
            drift=None if drift is None else _array(drift),
            block_size=self._block_size,
            grad_scale=grad_scale,
            weights_coefficient=weights_coefficient,
            drift_coefficient=drift_coefficient,
        )
        threads = max(1, min(torch.get_num_threads(), grad.numel() // _THREAD_NUMEL))
        (native.move if published is None else native.predict)(estimate, threads)
        # torch's checks of tensors saved for backward go by the version, which writing past torch does not change.
        torch.autograd.graph.increment_version(weights)
        if published is None and drift is not None:
            torch.autograd.graph.increment_version(drift)
        return True

    def _normalized(self, grad: torch.Tensor, grad_scale: float) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ``q = clamp(c g / d)`` in fp32, part by part, so that temporaries stay small."""
        n, block = grad.numel(), self._block_size
        chunk = max(1, _CHUNK_NUMEL.get(grad.device.type, _ACCELERATOR_CHUNK_NUMEL) // block) * block
        factor = self.inverse * grad_scale
        for begin in range(0, n, chunk):
            part = slice(begin, min(begin + chunk, n))
            q = grad[part].to(torch.float32, copy=True)
            factors = factor[begin // block : -(-part.stop // block)]
            whole = q.numel() // block * block
            q[:whole].view(-1, block).mul_(factors[: whole // block, None])
            q[whole:].mul_(factors[whole // block :])
            yield part, q.clamp_(-CLAMP, CLAMP)
