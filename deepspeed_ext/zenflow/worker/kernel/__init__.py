"""Computes the worker's exact Adam steps over host memory.

`adam_pass` is the contract (`AdamPass`, `MeanPass`). `reference` implements it with torch operations; `native` with a
small C++ library that `library` finds. Importing this package imports neither torch nor DeepSpeed.
"""

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPass, AdamStep, Array, Kernel, MeanPass, Publish
from deepspeed_ext.zenflow.worker.kernel.library import library_path
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel

__all__ = [
    "AdamPass",
    "AdamStep",
    "Array",
    "Kernel",
    "MeanPass",
    "NativeKernel",
    "Publish",
    "library_path",
    "load_kernel",
]


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
