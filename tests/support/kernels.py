"""What tests of the kernel share: the kernels that run here, and tensors as the kernel sees
them."""

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel import Array, Kernel, library_path, load_kernel

LIBRARY = library_path()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
needs_native = pytest.mark.skipif(
    LIBRARY is None, reason="no native kernel and no C++ compiler here"
)
KERNELS = [pytest.param("native", marks=needs_native), "reference"]


def make_kernel(name: str, threads: int = 1) -> Kernel:
    return load_kernel(LIBRARY if name == "native" else None, threads)


def array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.numel())
