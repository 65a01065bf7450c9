"""Computes the worker's exact steps over host memory.

`adam_pass` and `lion_pass` are the contracts; `state_layout` says what an optimizer keeps. `reference` implements the
passes with torch operations; `native` with a small C++ library that `library` finds. Importing this package imports
neither torch nor DeepSpeed.
"""

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPass, AdamStep, Array, Kernel, MeanPass, Publish
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
