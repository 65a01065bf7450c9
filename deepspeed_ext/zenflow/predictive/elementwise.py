"""The estimate's arithmetic on whole blocks: one definition in torch operations, which `Compiled` makes one pass.

All tensors are 2-D [blocks, block_size] and of any float dtype; `inverse`, 1-D fp32 [blocks], is 1 / d_b, and
`grad_scale` is c. Symbols are those of `estimator`. Everything is computed in fp32 on `grad`'s device and rounded once,
when it is stored.
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


class Compiled:
    """`function` as `torch.compile` makes it, with the same results to the bit; as it is, if that fails.

    It is compiled once for any number of blocks. Numbers among the arguments are passed as fp32 tensors, because a new
    value would compile again.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = None
        self._failed = False

    def __call__(self, *args: Any) -> None:
        if not self._failed:
            try:
                self._compiled = self._compiled or torch.compile(
                    self._function, options={"compile_threads": 1, "cpp.dynamic_threads": True}
                )
                device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
                return self._compiled(*(_compilable(arg, device) for arg in args))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # before anything is written: what was compiled has no way to fail
                self._failed = True
                first_line = str(error).strip().partition("\n")[0]
                logger.warning(
                    f"torch.compile failed for ZenFlow's estimate ({type(error).__name__}: {first_line}); "
                    "it runs as separate torch operations, which takes several times as long. Is there a C++ compiler, "
                    "and Triton for a GPU?"
                )
        return self._function(*args)


def _compilable(arg: Any, device: torch.device) -> Any:
    """`arg` such that another number, or another number of blocks, does not compile again. Does not wait for `device`,
    as a copy from the host would."""
    if isinstance(arg, float):
        return torch.full((), arg, dtype=torch.float32, device=device)
    if isinstance(arg, torch.Tensor):
        torch._dynamo.maybe_mark_dynamic(arg, 0)
    return arg


@functools.cache
def compiled(function: Callable[..., None]) -> Compiled:
    """Return the process's `Compiled` of `function`."""
    return Compiled(function)
