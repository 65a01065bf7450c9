"""Computes the worker's exact steps over host memory.

`adam_pass` and `lion_pass` are the contracts; `state_layout` says what an optimizer keeps.
`reference` implements the passes with torch operations; `native` with a small C++ library that
`library` finds. Importing this package imports neither torch nor DeepSpeed.
"""

from typing import Protocol

from deepspeed_ext.zenflow.worker.kernel.adam_pass import (
    AdamPass,
    AdamStep,
    Array,
    Publish,
)
from deepspeed_ext.zenflow.worker.kernel.library import library_path
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionPass, LionPublish, LionStep
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel

__all__ = [
    "AdamPass",
    "AdamStep",
    "Array",
    "Kernel",
    "LionPass",
    "LionPublish",
    "LionStep",
    "NativeKernel",
    "Publish",
    "library_path",
    "load_kernel",
]


class Kernel(Protocol):
    """Runs passes."""

    name: str
    """``native`` or ``reference``, for logs and checkpoints."""

    def run(self, adam_pass: AdamPass) -> None:
        """Run one pass; returns once memory holds the result."""

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """Decode whole blocks of m (int8 [n]) or of v (uint8 [n]) to fp32 [n]; a last block may be
        shorter."""

    def run_lion(self, lion_pass: LionPass) -> None:
        """Run one pass; returns once memory holds the result."""


def load_kernel(library: str | None, threads: int) -> Kernel:
    """Return the native kernel, or the reference if there is no library.

    Args:
        library: result of `library_path`; ``None`` selects the reference, which imports torch.
        threads: number of threads of either kernel.

    Raises:
        OSError: the library cannot be loaded, or has another version.
    """
    if library is not None:
        return NativeKernel(library, threads)
    from deepspeed_ext.zenflow.worker.kernel.reference import ReferenceKernel

    return ReferenceKernel(threads)
