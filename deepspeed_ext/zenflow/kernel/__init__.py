"""The worker's one pass over memory: exact Adam steps, then what the trainer needs to know.

`adam_pass` holds the contract (`AdamPass`, `MeanPass`), `reference` carries it out with torch operations, `native` with
a small C++ and OpenMP library that `build` finds or makes. Importing this package imports neither torch nor DeepSpeed.
"""

from deepspeed_ext.zenflow.kernel.adam_pass import AdamPass, AdamStep, Array, Kernel, MeanPass, Publish
from deepspeed_ext.zenflow.kernel.build import library_path
from deepspeed_ext.zenflow.kernel.native import NativeKernel

__all__ = ["AdamPass", "AdamStep", "Array", "Kernel", "MeanPass", "Publish", "library_path", "load_kernel"]


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
