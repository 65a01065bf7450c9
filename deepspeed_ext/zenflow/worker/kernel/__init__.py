"""Computes the worker's exact steps over host memory.

`passes` says what a pass is and how moments are kept; `adam_pass` and `lion_pass` are the
optimizers' parts. `definition` is the arithmetic in torch operations; `native` runs a small C++
library. Importing this package imports neither torch nor DeepSpeed.
"""

from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from deepspeed_ext.zenflow.worker.kernel.passes import Kernel


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
    from deepspeed_ext.zenflow.worker.kernel.definition import ReferenceKernel

    return ReferenceKernel(threads)
