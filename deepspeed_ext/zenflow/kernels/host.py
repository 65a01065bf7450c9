"""`predict` on the CPU: one pass of the native library, bitwise equal to the definition, which runs
without the library."""

from __future__ import annotations

import ctypes
import functools

import torch

from deepspeed_ext.zenflow.worker.kernel.definition import CLAMP
from deepspeed_ext.zenflow.worker.kernel.native import library_path, open_library
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_CODES

__all__ = ["predict", "serves"]

_CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
_NUMEL_PER_THREAD = 1 << 16
"""With fewer elements per thread, another thread costs more than it saves."""


class _Estimate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "published", "grad", "inverse")),
        *((name, ctypes.c_int64) for name in ("numel", "block_size")),
        *((name, ctypes.c_int32) for name in ("weights_dtype", "grad_dtype", "threads")),
        *((name, ctypes.c_float) for name in ("grad_scale", "coefficient", "bound")),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = library_path()
    return None if path is None else open_library(path)


def serves(
    weights: torch.Tensor, published: torch.Tensor, grad: torch.Tensor, inverse: torch.Tensor
) -> bool:
    """Whether the library can run on these arrays."""
    arrays = weights, published, grad, inverse
    return (
        all(a.device.type == "cpu" and a.is_contiguous() and a.dtype in _CODES for a in arrays)
        and inverse.dtype is torch.float32
        and weights.dtype is published.dtype
        and _library() is not None
    )


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    coefficient: float,
    block_size: int,
) -> None:
    """See `definition.predict`; `serves` must be true for the arrays."""
    library, numel = _library(), grad.numel()
    assert library is not None
    # C++ checks no bounds
    assert weights.numel() == published.numel() == numel
    assert inverse.numel() * block_size >= numel
    threads = min(torch.get_num_threads(), max(1, numel // _NUMEL_PER_THREAD))
    estimate = _Estimate(
        *(array.data_ptr() for array in (weights, published, grad, inverse)),
        *(numel, block_size, _CODES[weights.dtype], _CODES[grad.dtype], threads),
        *(grad_scale, coefficient, CLAMP),
    )
    library.dsext_predict(ctypes.byref(estimate))
    torch.autograd.graph.increment_version(weights)
