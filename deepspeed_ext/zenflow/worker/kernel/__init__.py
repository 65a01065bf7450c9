"""Computes the worker's exact steps over host memory.

`passes` says what a pass is; `adam_pass` and `lion_pass` are the optimizers' parts. `definition` is
the arithmetic in torch operations, which `reference` runs; `native` runs a small C++ library that
`library` finds. Importing this package imports neither torch nor DeepSpeed.
"""

from typing import Protocol

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.library import library_path
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from deepspeed_ext.zenflow.worker.kernel.passes import Array, Pass

__all__ = [
    "AdamStep",
    "Array",
    "Kernel",
    "NativeKernel",
    "Pass",
    "Publish",
    "library_path",
    "load_kernel",
]


class Kernel(Protocol):
    """Runs passes."""

    name: str
    """``native`` or ``reference``, for logs and checkpoints."""

    def run(self, work: Pass) -> None:
        """Run one pass; returns once memory holds the result."""

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """Decode whole blocks of m (int8 [n]) or of v (uint8 [n]) to fp32 [n]; a last block may be
        shorter."""


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
