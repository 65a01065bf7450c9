"""`predict` and `move` on the CPU: one pass of the native library, bitwise equal to the
definition.

Without the library, the definition runs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from deepspeed_ext.zenflow.kernels.definition import CLAMP
from deepspeed_ext.zenflow.worker.kernel.library import library_path
from deepspeed_ext.zenflow.worker.kernel.native import DTYPE_CODES, open_library

__all__ = ["move", "predict", "serves"]

_CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
_NUMEL_PER_THREAD = 1 << 16
"""With fewer elements per thread, another thread costs more than it saves."""


class _Estimate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "published", "drift", "grad", "inverse")),
        *((name, ctypes.c_int64) for name in ("numel", "block_size")),
        *((name, ctypes.c_int32) for name in ("weights_dtype", "grad_dtype", "threads")),
        *(
            (name, ctypes.c_float)
            for name in ("grad_scale", "coefficient", "drift_coefficient", "bound")
        ),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = library_path()
    return None if path is None else open_library(path)


def serves(
    inverse: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, *others: torch.Tensor | None
) -> bool:
    """Whether the library can run on these arrays. `others` are y and D, in the dtype of the
    weights."""
    like_weights = [weights, *(array for array in others if array is not None)]
    return (
        all(
            a.device.type == "cpu" and a.is_contiguous() and a.dtype in _CODES
            for a in (inverse, grad, *like_weights)
        )
        and inverse.dtype is torch.float32
        and len({array.dtype for array in like_weights}) == 1
        and _library() is not None
    )


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    drift: torch.Tensor | None,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    coefficient: float,
    block_size: int,
) -> None:
    """See `definition.predict`; `serves` must be true for the arrays."""
    numbers = {"grad_scale": grad_scale, "coefficient": coefficient}
    _run("dsext_predict", weights, published, drift, grad, inverse, numbers, block_size)
    torch.autograd.graph.increment_version(weights)


def move(
    weights: torch.Tensor,
    drift: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    weights_coefficient: float,
    drift_coefficient: float,
    block_size: int,
) -> None:
    """See `definition.move`; `serves` must be true for the arrays."""
    numbers = {
        "grad_scale": grad_scale,
        "coefficient": weights_coefficient,
        "drift_coefficient": drift_coefficient,
    }
    _run("dsext_move", weights, None, drift, grad, inverse, numbers, block_size)
    for array in (weights, drift):
        torch.autograd.graph.increment_version(array)


def _threads(numel: int) -> int:
    return min(torch.get_num_threads(), max(1, numel // _NUMEL_PER_THREAD))


def _run(
    function: str,
    weights: torch.Tensor,
    published: torch.Tensor | None,
    drift: torch.Tensor | None,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    numbers: dict[str, float],
    block_size: int,
) -> None:
    library, numel = _library(), grad.numel()
    assert library is not None
    # C++ checks no bounds
    assert all(array is None or array.numel() == numel for array in (weights, published, drift))
    assert inverse.numel() * block_size >= numel
    estimate = _Estimate(
        weights=weights.data_ptr(),
        published=None if published is None else published.data_ptr(),
        drift=None if drift is None else drift.data_ptr(),
        grad=grad.data_ptr(),
        inverse=inverse.data_ptr(),
        numel=numel,
        block_size=block_size,
        weights_dtype=_CODES[weights.dtype],
        grad_dtype=_CODES[grad.dtype],
        threads=_threads(numel),
        bound=CLAMP,
        **numbers,
    )
    getattr(library, function)(ctypes.byref(estimate))
