"""Passes over host memory: the worker's exact Adam steps, and the trainer's estimate where its gradients are there too.

`adam_pass` holds the contract (`AdamPass`, `MeanPass`), `reference` carries it out with torch operations, `native` with
a small C++ and OpenMP library that `build` finds or makes; `estimate` likewise, with `predict` of the folder above as
the torch operations. Importing this package imports neither torch nor DeepSpeed.
"""

from deepspeed_ext.zenflow.kernel.adam_pass import AdamPass, AdamStep, Array, Kernel, MeanPass, Publish
from deepspeed_ext.zenflow.kernel.build import library_path
from deepspeed_ext.zenflow.kernel.estimate import CLAMP, Estimate
from deepspeed_ext.zenflow.kernel.native import NativeEstimate, NativeKernel

__all__ = [
    "CLAMP",
    "AdamPass",
    "AdamStep",
    "Array",
    "Estimate",
    "Kernel",
    "MeanPass",
    "NativeEstimate",
    "NativeKernel",
    "Publish",
    "library_path",
    "load_kernel",
]


def load_kernel(library: str | None, threads: int) -> Kernel:
    """Return the native kernel of ``library`` on ``threads`` threads, or the reference when there is no library.

    Args:
        library: what `library_path` returned; ``None`` asks for the reference, which imports torch.
        threads: OpenMP threads of the native kernel, torch threads of the reference.
    """
    if library is not None:
        return NativeKernel(library, threads)
    from deepspeed_ext.zenflow.kernel.reference import ReferenceKernel

    return ReferenceKernel(threads)
