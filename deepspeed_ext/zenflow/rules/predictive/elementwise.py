"""The estimate's arithmetic on whole blocks: one definition in torch operations, which `compiled` makes one pass.

All tensors are 2-D [blocks, block_size] and of any float dtype; `inverse`, 1-D fp32 [blocks], is 1 / d_b, and
`grad_scale` is c. Symbols are those of `estimator`. Everything is computed in fp32 on `grad`'s device and rounded once,
when it is stored.
"""

from __future__ import annotations

import torch

__all__ = ["CLAMP", "move", "predict"]

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element that dominates
it."""

Number = float | torch.Tensor


def _normalized(grad: torch.Tensor, inverse: torch.Tensor, grad_scale: Number) -> torch.Tensor:
    return grad.to(torch.float32, copy=True).mul_((inverse * grad_scale)[:, None]).clamp_(-CLAMP, CLAMP)


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    drift: torch.Tensor | None,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: Number,
    coefficient: Number,
) -> None:
    """Compute ``weights = published - drift - coefficient q``, in place; without drift if it is None."""
    moved = _normalized(grad, inverse, grad_scale).mul_(-coefficient)
    arrived = published.to(grad.device, non_blocking=True)
    weights.copy_(moved.add_(arrived if drift is None else arrived.float().sub(drift)))


def move(
    weights: torch.Tensor,
    drift: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: Number,
    weights_coefficient: Number,
    drift_coefficient: Number,
) -> None:
    """Compute ``weights -= weights_coefficient q`` and ``drift += drift_coefficient q``, in place."""
    q = _normalized(grad, inverse, grad_scale)
    weights.copy_((q * -weights_coefficient).add_(weights.to(q.device)))
    drift.copy_(q.mul_(drift_coefficient).add_(drift))
