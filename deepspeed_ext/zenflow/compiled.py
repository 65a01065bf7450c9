"""Compiles elementwise arithmetic on rows of blocks to one pass, or runs it as separate torch operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext.runtime.log import logger
from deepspeed_ext.zenflow.transfers.device_sizes import COMPILED_FROM_NUMEL

__all__ = ["COMPILED_FROM_NUMEL", "compiled"]


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
                said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                logger.warning(
                    f"torch.compile failed for ZenFlow's {self._function.__name__} ({said}); "
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
