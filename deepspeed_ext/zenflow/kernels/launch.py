"""Runs the arithmetic of a step on flat arrays: if possible as one Triton kernel or, for weights
that the host computes, as one pass of the native library, otherwise by its definition.

All give bitwise the same result (norms: up to the last bits of fp64, which depend on the order of
addition), so ranks, steps and resumed runs may use different ones.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.zenflow.kernels import host
from deepspeed_ext.zenflow.plan.chunks import LARGEST_KERNEL_BLOCK
from deepspeed_ext.zenflow.worker.kernel import definition
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPasses, AdamStep
from deepspeed_ext.zenflow.worker.kernel.passes import rounding_key

__all__ = [
    "NORM_PART",
    "NORM_SUM",
    "OPTIONS",
    "Variant",
    "adam_step",
    "is_aligned",
    "missing",
    "norms",
    "predict",
    "prepare",
    "serves",
    "shape_constants",
    "variants",
]

Variant = tuple[str, tuple[torch.dtype, ...], tuple[tuple[str, Any], ...]]
"""A kernel, the dtypes of its arrays and its constants; each combination is compiled once."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every kernel. A fused multiply-add would round once, unlike the definition."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)
_ALIGNMENT = 16
_TILE_NUMEL = {"predict": 2048, "adam_step": 1024}
_UNALIGNED_TILE_NUMEL = 512
"""A thread loads the elements of an unaligned tile one by one: more of them only cost registers and
compile time."""
NORM_PART = {"PART": 1 << 15, "TILE": 1 << 11}
NORM_SUM = {"TILE": 256}

_variants: set[Variant] = set()
_given_up: dict[str, str] = {}


def variants() -> frozenset[Variant]:
    """The variants that this process has launched so far; each is compiled once, at its first
    launch."""
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
        block_size <= LARGEST_KERNEL_BLOCK
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
    rest: Sequence[Any],
    programs: int,
    constants: dict[str, Any],
    written: Sequence[torch.Tensor],
) -> None:
    """Launch a kernel on the current stream, and tell autograd what it writes."""
    device = arrays[0].device
    module = _found(device.type)
    _variants.add((kernel, tuple(a.dtype for a in arrays), tuple(constants.items())))
    with get_accelerator().device(device.index):
        getattr(module, kernel)[(programs,)](*arrays, *rest, **constants, **OPTIONS)
    for array in written:
        torch.autograd.graph.increment_version(array)


def _run_on_blocks(
    kernel: str,
    arrays: Sequence[torch.Tensor],
    per_block: Sequence[torch.Tensor],
    numbers: Sequence[float],
    block_size: int,
    written: Sequence[torch.Tensor],
) -> None:
    """Launch an elementwise kernel on `arrays`, 1-D [n]."""
    n = arrays[0].numel()
    if n == 0:
        return
    constants = shape_constants(kernel, block_size, is_aligned(block_size, arrays))
    programs = max(1, -(-(n // block_size) // constants["ROWS"]))
    _run(kernel, [*arrays, *per_block], [n, *numbers], programs, constants, written)


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
        _run_on_blocks("predict", arrays, [inverse], numbers, block_size, [weights])
        return
    run = host.predict if host.serves(*arrays, inverse) else definition.predict
    run(*arrays, inverse, *numbers, block_size)


def adam_step(
    state: Sequence[torch.Tensor], grad: torch.Tensor, weights: torch.Tensor, step: AdamStep
) -> None:
    """Take one Adam step of whole blocks in place, and round p to `weights`. One launch.

    Args:
        state: p, fp32 [k, block_size], one row per block; m and v of that shape, fp32, bfloat16, or
            codes (int8 and uint8); then the scales of codes, uint8 [k] each.
        grad, weights: [k, block_size], any float dtype, on their device.
        step: the step's constants.
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
    _run_on_blocks("adam_step", flat, of_blocks, numbers, block_size, written)


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of many tensors, with sums in fp64, in two launches: the first reads the tensors
    once, the second adds the sums of their parts.

    Args:
        tensors: contiguous and not empty, of any shapes, of one dtype and on one device; `serves`
            must be true for them.

    Returns:
        1-D fp64 [len(tensors)], on the device.
    """
    device, count, part = tensors[0].device, len(tensors), NORM_PART["PART"]
    addresses = [tensor.data_ptr() for tensor in tensors]
    lengths = [tensor.numel() for tensor in tensors]
    *firsts, programs = itertools.accumulate((-(-n // part) for n in lengths), initial=0)
    table = torch.tensor([addresses, lengths, firsts], dtype=torch.int64, device="cpu")
    table = get_accelerator().pin_memory(table).to(device, non_blocking=True)
    sums = torch.empty(programs, dtype=torch.float64, device=device)
    found = torch.empty(count, dtype=torch.float64, device=device)
    like = tensors[0].detach()
    _run("sums_of_squares", [sums, *table, like], [count], programs, NORM_PART, [])
    _run("norms", [found, sums, table[2]], [count, programs], count, NORM_SUM, [])
    return found


def prepare(
    device: torch.device, block_size: int, calls: Iterable[Callable[[], object]], *, warns: bool
) -> None:
    """Compile a run's kernels while its engine is built, so that no step has to.

    If one does not compile, this process uses torch operations for everything.

    Args:
        device: where the weights are.
        block_size: elements per block.
        calls: each launches one variant of a kernel on small arrays.
        warns: whether this rank logs why there are no kernels, on devices that should have them.
    """
    if block_size > LARGEST_KERNEL_BLOCK:
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
