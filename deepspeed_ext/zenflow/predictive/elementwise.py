"""The estimate's arithmetic on whole blocks: one definition in torch operations, which `Compiled` makes one pass.

All tensors are 2-D [blocks, block_size] and of any float dtype; `factors`, 1-D fp32 [blocks], are c / d_b. Symbols are
those of `estimator`. Everything is computed in fp32 on `grad`'s device and rounded once, when it is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext._logging import logger

__all__ = ["CLAMP", "compiled", "move", "predict"]

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element that dominates
it."""

Coefficient = float | torch.Tensor


def _normalized(grad: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.float32, copy=True).mul_(factors[:, None]).clamp_(-CLAMP, CLAMP)


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    drift: torch.Tensor | None,
    grad: torch.Tensor,
    factors: torch.Tensor,
    coefficient: Coefficient,
) -> None:
    """Compute ``weights = published - drift - coefficient q``, in place; without drift if it is None."""
    moved = _normalized(grad, factors).mul_(-coefficient)
    arrived = published.to(grad.device, non_blocking=True)
    weights.copy_(moved.add_(arrived if drift is None else arrived.float().sub(drift)))


def move(
    weights: torch.Tensor,
    drift: torch.Tensor,
    grad: torch.Tensor,
    factors: torch.Tensor,
    weights_coefficient: Coefficient,
    drift_coefficient: Coefficient,
) -> None:
    """Compute ``weights -= weights_coefficient q`` and ``drift += drift_coefficient q``, in place."""
    q = _normalized(grad, factors)
    weights.copy_((q * -weights_coefficient).add_(weights.to(q.device)))
    drift.copy_(q.mul_(drift_coefficient).add_(drift))


class Compiled:
    """`function` as `torch.compile` makes it, with the same results to the bit; as it is, if that fails.

    Numbers among the arguments are passed as fp32 tensors: a new value does not compile again.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = None
        self._failed = False

    def __call__(self, *args: Any) -> None:
        if not self._failed:
            try:
                self._compiled = self._compiled or torch.compile(
                    self._function, dynamic=False, options={"compile_threads": 1, "cpp.dynamic_threads": True}
                )
                numbers_as_tensors = (
                    torch.tensor(a, dtype=torch.float32, device="cpu") if isinstance(a, float) else a for a in args
                )
                return self._compiled(*numbers_as_tensors)
            except Exception as error:  # before anything is written: what was compiled has no way to fail
                self._failed = True
                first_line = str(error).strip().partition("\n")[0]
                logger.warning(
                    f"torch.compile failed for ZenFlow's estimate ({type(error).__name__}: {first_line}); "
                    "it runs as separate torch operations, which takes several times as long. Is there a C++ compiler?"
                )
        return self._function(*args)


@functools.cache
def compiled(function: Callable[..., None]) -> Compiled:
    """Return the process's `Compiled` of `function`."""
    return Compiled(function)
