"""Runs the arithmetic of a step on flat arrays: if possible as one Triton kernel or, for weights
that the host computes, as one pass of the native library, otherwise by its definition.

All give bitwise the same result, so ranks, steps and resumed runs may use different ones.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.zenflow.worker.kernel import definition
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPasses, AdamStep
from deepspeed_ext.zenflow.worker.kernel.native import library_path, open_library
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_CODES, rounding_key

Variant = tuple[str, tuple[torch.dtype, ...], tuple[tuple[str, Any], ...]]
"""A kernel, the dtypes of its arrays and its constants; each combination is compiled once."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every kernel. A fused multiply-add would round once, unlike the definition."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)
_NUMEL_PER_THREAD = 1 << 16
"""With fewer elements per thread, another thread of the host costs more than it saves."""
_LARGEST_BLOCK = 256
"""Elements of the largest block with a kernel; larger ones are computed as torch operations."""
_ALIGNMENT = 16
_TILE_NUMEL = {"predict": 2048, "adam_step": 1024}
_UNALIGNED_TILE_NUMEL = 512
"""A thread loads the elements of an unaligned tile one by one: more of them only cost registers and
compile time."""

_variants: set[Variant] = set()
_given_up: dict[str, str] = {}


def variants() -> frozenset[Variant]:
    """The variants that this process has launched so far."""
    return frozenset(_variants)


@functools.cache
def _found(device_type: str) -> ModuleType | str:
    """The kernels for a type of device, or why there are none."""
    if device_type == "cpu":
        return "kernels are for accelerators"
    try:
        from triton.runtime import driver

        from deepspeed_ext.zenflow.kernels import device
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install triton"
    try:
        served = driver.active.get_active_torch_device().type
    except Exception as error:  # a driver of another vendor may raise anything
        return f"Triton finds no device: {str(error).strip().partition(chr(10))[0]}"
    return device if served == device_type else f"Triton serves {served}, not {device_type}"


def missing(device: torch.device) -> str | None:
    """Why no kernel runs on `device`; None if they do."""
    found = _found(device.type)
    return found if isinstance(found, str) else _given_up.get(device.type)


def serves(block_size: int, *arrays: torch.Tensor) -> bool:
    """Whether a kernel can run on these arrays."""
    device = arrays[0].device
    return (
        block_size <= _LARGEST_BLOCK
        and missing(device) is None
        and all(a.device == device and a.is_contiguous() and a.dtype in _DTYPES for a in arrays)
    )


def shape_constants(kernel: str, block_size: int, aligned: bool) -> dict[str, Any]:
    """The constants of an elementwise kernel for a block size."""
    columns = 1 << (block_size - 1).bit_length()
    rows = max(1, (_TILE_NUMEL[kernel] if aligned else _UNALIGNED_TILE_NUMEL) // columns)
    return {"BLOCK": block_size, "COLUMNS": columns, "ROWS": rows, "ALIGNED": aligned}


def is_aligned(block_size: int, arrays: Sequence[torch.Tensor]) -> bool:
    """Whether every row of `arrays` begins at a multiple of 16 bytes."""
    return all(
        a.data_ptr() % _ALIGNMENT == 0 and block_size * a.itemsize % _ALIGNMENT == 0 for a in arrays
    )


def _run(
    kernel: str,
    arrays: Sequence[torch.Tensor],
    per_block: Sequence[torch.Tensor],
    numbers: Sequence[float],
    block_size: int,
    written: Sequence[torch.Tensor],
) -> None:
    """Launch a kernel on `arrays`, 1-D [n]; tell autograd what it writes."""
    n, device = arrays[0].numel(), arrays[0].device
    if n == 0:
        return
    constants = shape_constants(kernel, block_size, is_aligned(block_size, arrays))
    programs = max(1, -(-(n // block_size) // constants["ROWS"]))
    every = [*arrays, *per_block]
    _variants.add((kernel, tuple(a.dtype for a in every), tuple(constants.items())))
    with get_accelerator().device(device.index):
        run = getattr(_found(device.type), kernel)[(programs,)]
        run(*every, n, *numbers, **constants, **OPTIONS)
    for array in written:
        torch.autograd.graph.increment_version(array)


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    coefficient: float,
    block_size: int,
) -> None:
    """See `definition.predict`."""
    arrays, numbers = (weights, published, grad), (grad_scale, coefficient)
    if serves(block_size, *arrays, inverse):
        _run("predict", arrays, [inverse], numbers, block_size, [weights])
        return
    on_host = {(a.device.type, a.is_contiguous()) for a in (*arrays, inverse)} == {("cpu", True)}
    serves_it = on_host and weights.dtype is published.dtype and _library() is not None
    run = predict_on_host if serves_it else definition.predict
    run(*arrays, inverse, *numbers, block_size)


class _Estimate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "published", "grad", "inverse")),
        *((name, ctypes.c_int64) for name in ("numel", "block_size")),
        *((name, ctypes.c_int32) for name in ("weights_dtype", "grad_dtype", "threads")),
        *((name, ctypes.c_float) for name in ("grad_scale", "coefficient", "bound")),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    return open_library(path) if (path := library_path()) is not None else None


def predict_on_host(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    coefficient: float,
    block_size: int,
) -> None:
    """`predict` by the native library, which there must be, of arrays on the host."""
    library = _library()
    assert library is not None
    w, y, g, of_blocks = map(definition.as_array, (weights, published, grad, inverse))
    # C++ checks no bounds
    assert w[1:] == y[1:] == (y.dtype, g.numel)
    assert of_blocks.dtype == "float32"
    assert of_blocks.numel * block_size >= g.numel
    threads = min(torch.get_num_threads(), max(1, g.numel // _NUMEL_PER_THREAD))
    estimate = _Estimate(
        *(each.address for each in (w, y, g, of_blocks)),
        *(g.numel, block_size, DTYPE_CODES[w.dtype], DTYPE_CODES[g.dtype], threads),
        *(grad_scale, coefficient, definition.CLAMP),
    )
    library.dsext_predict(ctypes.byref(estimate))
    torch.autograd.graph.increment_version(weights)


def adam_step(
    state: Sequence[torch.Tensor], grad: torch.Tensor, weights: torch.Tensor, step: AdamStep
) -> None:
    """Take one Adam step of whole blocks in place, and round p to `weights`. One launch.

    Args:
        state: p, fp32 [k, block_size], one row per block; m and v of that shape, fp32, bfloat16, or
            codes (int8 and uint8); then the scales of codes, uint8 [k] each.
        grad, weights: [k, block_size], any float dtype, on their device.
    """
    p, m, v, *scales = state
    block_size, flat = p.shape[1], [array.view(-1) for array in (p, m, v, grad, weights)]
    if not serves(block_size, grad, weights, *state):
        AdamPasses.take_step([*flat[:3], *scales], flat[3], step, block_size)
        weights.copy_(p)
        return
    betas = step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2
    scales_of_step = *step.corrections, step.grad_scale, step.lr
    numbers = (rounding_key(step.step), *scales_of_step, *betas, step.eps, step.l2, step.decay)
    of_blocks = scales or flat[1:3]  # which are not read as scales
    written = [*flat[:3], flat[-1], *scales]
    _run("adam_step", flat, of_blocks, numbers, block_size, written)


def prepare(
    device: torch.device, block_size: int, calls: Iterable[Callable[[], object]], *, warns: bool
) -> None:
    """Compile the kernels of a plan as it begins, before a step needs them. If one does not
    compile, this process uses torch operations for everything.

    Args:
        calls: each launches one variant of a kernel on small arrays.
        warns: whether this rank logs why there are no kernels, on devices that should have them.
    """
    if block_size > _LARGEST_BLOCK:
        return
    begin = time.perf_counter()
    if missing(device) is None:
        try:
            for call in calls:
                call()
            seconds, count = time.perf_counter() - begin, len(variants())
            logger.debug(
                f"ZenFlow's kernels for {device} were ready after {seconds:.2f} s: {count} variants"
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            _given_up[device.type] = f"A kernel failed at the start ({why})"
    reason = missing(device)
    if reason is not None and device.type != "cpu" and warns:
        warn_once(
            f"ZenFlow computes in torch operations on {device}, a chunk at a time, which takes "
            f"several times as long as its Triton kernels; results are the same. {reason}"
        )
