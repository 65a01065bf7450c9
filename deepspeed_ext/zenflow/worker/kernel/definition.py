"""The arithmetic of a step in torch operations: the definition of all kernels, on accelerators and
in the worker, and the fallback if none can run.

Large arrays are processed in chunks of whole blocks, so temporaries are small for any size of
array; on the CPU they also stay in a core's L2 cache. Each operation rounds once in fp32: no
`lerp`, `addcmul`, `add` with a factor, division by a number or torch's `sqrt`, which round
differently on different devices. A 16-bit result is rounded once, when it is stored. So results
depend neither on the chunks nor on the number of threads, and equal those of the device's kernels
bitwise. The native pass of Adam fuses products and sums, so its last bits differ.
Symbols are those of `deepspeed_ext.zenflow.optimizers.adam`.

Estimates are *dithered* when they are stored in 16 bits: rounded up or down at random, so that the
mean is right (Gupta et al., 2015, arXiv 1502.02551). A gradient's effect on one step is mostly less
than half a step of bfloat16, and rounding to nearest would lose it. The random number is a hash of
the value's own bits, so it needs no state and does not depend on the element's position::

    x dithered = the upper bits of (bits of x) + (the lower k bits of hash(bits of x))
    k: 16 (bf16), 13 (fp16)

A NaN stays a NaN. Numbers below the normal range of fp16 are rounded to the nearest value. The hash
is that of Note: [rounded moments].
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_ext.zenflow.worker.kernel.passes import (
    ACCELERATOR_CHUNK_NUMEL,
    HASH_FACTORS,
    HASH_SHIFTS,
    HOST_CHUNK_NUMEL,
    WORD,
    Array,
    Kernel,
    Pass,
    StateLayout,
    chunk_of,
    dtype_name,
    rounding_key,
)

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element
that dominates it."""

MOST_SCALE = 238
"""The largest finite scale, as stored: with it, even the largest code decodes to a finite value."""
NOT_FINITE = 255
_NEAREST = 1 << 15
"""r' that rounds to the nearest value."""


class Codes(NamedTuple):
    """Constants in which the codes of m and v differ."""

    most: int
    """K."""
    mantissa: int
    """The fraction bits of K^2 in fp32."""
    exponent: int
    """Its exponent."""
    least_above_half: int
    """The least code k with k^2 > K^2 / 2."""
    least: int
    """The least code of a value that is not zero."""


CODES = {"int8": Codes(123, 0x6C6400, 13, 87, 0), "uint8": Codes(239, 0x5F2100, 15, 169, 1)}

_CHUNK_NUMEL = {"cpu": HOST_CHUNK_NUMEL}

# MKL chooses its code for `sqrt` at the first call in a process. If several threads make that call
# at the same time, one of them may get a version with 12 correct bits, for this call only
# (pytorch#188792); measured: in one fresh process of 55.
torch.ones(1, dtype=torch.float32, device="cpu").sqrt()

_SIGNED_FACTORS = tuple(factor - (1 << 32) if factor >> 31 else factor for factor in HASH_FACTORS)
"""As int32, whose products wrap to 32 bits."""
_CUT_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of an fp32 number that the dtype drops."""


def chunk_numel(device: torch.device, block_size: int) -> int:
    """Elements computed at once on `device`: whole blocks."""
    return chunk_of(_CHUNK_NUMEL.get(device.type, ACCELERATOR_CHUNK_NUMEL), block_size)


# Note: [the nearest root]
# On the CPU torch's sqrt is MKL's, of which one result in 170 is not the nearest number; in fp64,
# too. CUDA's is the nearest, Triton's sqrt_rn as well, and NumPy's: it is the CPU's instruction.


def root(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest fp32 number to each square root, on any device; see Note: [the nearest root].

    Args:
        x: fp32, any shape. A negative element gives NaN.
        out: what is written and returned, of the same shape on the same device; may be `x`. None: a
            new tensor.
    """
    out = torch.empty_like(x) if out is None else out
    if x.device.type != "cpu":
        return torch.sqrt(x, out=out)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.numpy(), out=out.numpy())
    return out


# -- the estimate ----------------------------------------------------------------------------------


def parts_of(n: int, block_size: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    """Parts of 1-D arrays of n elements: their elements, their blocks, and the elements of a row,
    which is a block; a short last block is a separate part."""
    chunk, whole = chunk_numel(device, block_size), n // block_size * block_size
    for begin in range(0, whole, chunk):
        end = min(begin + chunk, whole)
        yield slice(begin, end), slice(begin // block_size, end // block_size), block_size
    if whole < n:
        yield slice(whole, n), slice(whole // block_size, None), n - whole


def dithered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x`, fp32, dithered to values of `dtype` in place."""
    if dtype not in _CUT_BITS:
        return x
    mask, bits = (1 << _CUT_BITS[dtype]) - 1, x.view(torch.int32)
    random = bits.clone()
    for shift, factor in zip(HASH_SHIFTS, (*_SIGNED_FACTORS, 1), strict=True):
        random.bitwise_xor_((random >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    is_nan = x.isnan()
    bits.add_(random.bitwise_and_(mask)).bitwise_and_(~mask)
    return x.masked_fill_(is_nan, math.nan)


def predict(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    grad_scale: float,
    coefficient: float,
    block_size: int,
) -> None:
    """Compute ``weights = published - coefficient q``, dithered, in place.

    Args:
        weights, published: 1-D [n], any float dtype, any device.
        grad: 1-D [n], any float dtype.
        inverse: 1 / d_b of each block, 1-D fp32 [ceil(n / block_size)], on grad's device.
        grad_scale: c.
        coefficient: multiplier of q.
        block_size: elements per block.
    """
    for part, blocks, row in parts_of(grad.numel(), block_size, grad.device):
        q = grad[part].view(-1, row).to(torch.float32, copy=True)
        q.mul_((inverse[blocks] * grad_scale)[:, None]).clamp_(-CLAMP, CLAMP).mul_(-coefficient)
        q.add_(published[part].view(-1, row).to(grad.device, non_blocking=True))
        weights[part].copy_(dithered(q, weights.dtype).view(-1))


def block_means(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """The mean of each block of `values`, 1-D; the last block may be shorter."""
    whole = values.numel() // block_size * block_size
    means = values[:whole].view(-1, block_size).mean(1)
    rest = values[whole:]
    return torch.cat([means, rest.mean().view(1)]) if rest.numel() else means


# -- moments of 16 or 8 bits -----------------------------------------------------------------------


def loaded(
    stored: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v in fp32: the arrays themselves if they are fp32, else copies.

    Args:
        stored: m and v, fp32, bfloat16 or codes; 1-D [n], on one device.
        scales: of codes, uint8 [ceil(n / block_size)] each; empty: they are not coded.
        block_size: elements per block.
    """
    if not scales:
        return stored[0].float(), stored[1].float()
    moments = torch.empty(2, stored[0].numel(), dtype=torch.float32, device=stored[0].device)
    for codes, of_blocks, moment in zip(stored, scales, moments, strict=True):
        decode(codes, of_blocks, block_size, moment)
    return moments[0], moments[1]


def store(
    moments: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    block_size: int,
    rounding: tuple[int, int] | None = None,
) -> None:
    """Write m and v of `loaded` to `stored`, and change them to what that can hold.

    Args:
        rounding: numbers of the update, and of the first element in its partition, which give the
            random numbers to round with; None: to the nearest value, for numbers of `loaded`.
    """
    if stored[0] is moments[0]:
        return
    m = moments[0]
    halves = _random_halves(*rounding, m.numel(), m.device) if rounding else (None, None)
    for k, (moment, target, up_by) in enumerate(zip(moments, stored, halves, strict=True)):
        if scales:
            encode(moment, target, scales[k], block_size, up_by)
            decode(target, scales[k], block_size, moment)
            continue
        if up_by is not None:
            is_nan = moment.isnan()
            moment.view(torch.int32).add_(up_by.to(torch.int32)).bitwise_and_(-0x10000)
            moment.masked_fill_(is_nan, math.nan)
        target.copy_(moment)


def step_in_fp32(
    layout: StateLayout,
    state: Sequence[torch.Tensor],
    grad: torch.Tensor,
    step: Any,
    block_size: int,
    first: int,
) -> None:
    """`Passes.take_host_step` of whole blocks whose moments are kept as `layout` says, but given
    and changed as fp32: p, m, v, 1-D [n], host."""
    p, *moments = state
    blocks = -(-p.numel() // block_size)
    stored = [
        moment if not layout.rounding else torch.empty_like(moment, dtype=getattr(torch, dtype))
        for moment, (_, dtype) in zip(moments, layout.arrays[1:], strict=True)
    ]
    scales = [torch.empty(blocks, dtype=torch.uint8, device=p.device) for _ in layout.scales]
    store(moments, stored, scales, block_size)
    layout.passes.take_host_step([p, *stored, *scales], grad, step, block_size, first)
    for moment, kept in zip(moments, loaded(stored, scales, block_size), strict=True):
        moment.copy_(kept)


def _random_halves(
    step: int, first: int, numel: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The random numbers below 2^16 that update `step` rounds m and v with, int64 [numel] each;
    `first` is the number of the first element in its partition."""
    number = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    random = number.add_(rounding_key(step)).bitwise_and_(WORD)
    for shift, factor in zip(HASH_SHIFTS, (*HASH_FACTORS, 1), strict=True):
        random.bitwise_xor_(random >> shift).mul_(factor).bitwise_and_(WORD)
    return random & 0xFFFF, random >> 16


@torch.no_grad()
def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block_size: int,
    up_by: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks of a moment.

    Args:
        values: 1-D fp32 [n], any device; the last block may be shorter.
        codes: receives their codes: int8 [n] of m, uint8 [n] of v.
        scales: receives the scale of each block: uint8 [ceil(n / block_size)].
        block_size: elements per block.
        up_by: random numbers below 2^16, int64 [n]; None: round to the nearest value.
    """
    kind = CODES[dtype_name(codes.dtype)]
    x = in_blocks(values, block_size)
    largest = (x.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(1)
    stored = ((largest.long() + (0x7FFFFF - kind.mantissa)) >> 23) - kind.exponent
    is_finite = stored <= MOST_SCALE
    scales.copy_(torch.where(is_finite, stored.clamp(min=1), NOT_FINITE))
    unit = _units(scales)[:, None]
    scaled = torch.where(is_finite[:, None], x, 0.0).abs().div_(unit).nan_to_num_(0.0)
    k = root(scaled).floor_()
    up = _NEAREST if up_by is None else in_blocks(up_by.float(), block_size)
    k += ((scaled - k * k) * 65536.0) > (k + k + 1.0) * up
    least = torch.where(x != 0.0, float(kind.least), 0.0)
    least.masked_fill_(scaled > kind.most**2 / 2, float(kind.least_above_half))
    k = torch.maximum(k, least).mul_(is_finite[:, None]).copysign_(x)
    codes.copy_(k.view(-1)[: values.numel()])


@torch.no_grad()
def decode(
    codes: torch.Tensor, scales: torch.Tensor, block_size: int, values: torch.Tensor
) -> None:
    """Decode whole blocks of a moment; the arguments are those of `encode`, and `values` is
    written."""
    k = in_blocks(codes, block_size).float()
    k.mul_(k.abs()).mul_(_units(scales)[:, None])
    values.copy_(k.view(-1)[: codes.numel()])


def in_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """View as [blocks, block_size], with a shorter last block padded with zeros."""
    missing = -values.numel() % block_size
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(
        -1, block_size
    )


def _units(scales: torch.Tensor) -> torch.Tensor:
    """The scales as factors, fp32."""
    factors = (scales.to(torch.int32) << 23).view(torch.float32)
    return factors.masked_fill(scales == NOT_FINITE, math.nan)


# -- passes ----------------------------------------------------------------------------------------


def as_tensor(array: Array) -> torch.Tensor:
    """View ``array`` as a 1-D CPU tensor. The memory must outlive the tensor."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.address)
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype), count=array.numel)


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous CPU tensor, which must outlive the array."""
    assert (tensor.device.type, tensor.is_contiguous()) == ("cpu", True)
    return Array(tensor.data_ptr(), dtype_name(tensor.dtype), tensor.numel())


class ReferenceKernel(Kernel):
    """Runs passes with torch on the CPU, in a pool of ``threads`` threads.

    Each thread processes whole chunks and runs its operations alone: operations split among threads
    would each wait for the slowest thread. Results depend neither on the number of threads nor on
    the chunk size, because every operation is elementwise and chunks end at block boundaries. The
    calling process's number of torch threads does not change.

    Args:
        threads: number of threads.
        chunk_numel: elements per chunk, rounded down to whole blocks, but at least one block.
    """

    name = "reference"

    def __init__(self, threads: int, chunk_numel: int = HOST_CHUNK_NUMEL) -> None:
        self._pool = ThreadPoolExecutor(threads, "dsext-pass", _divide_nothing)
        self._chunk_numel = chunk_numel

    def run(self, work: Pass, publish: Any, step: Any = None, peeks: bool = False) -> None:
        if work.numel == 0:
            return
        block, layout, passes = work.block_size, work.layout, work.layout.passes
        blocks = max(1, self._chunk_numel // block)
        chunk, elements = blocks * block, len(layout.kinds)

        def split(array: Array | None, size: int) -> Sequence[torch.Tensor]:
            return () if array is None else as_tensor(array).split(size)

        arrays = [split(each, chunk) for each in work.state[:elements]]
        arrays += [split(each, blocks) for each in work.state[elements:]]
        published, grads = split(work.published, chunk), split(step and work.grad, chunk)
        known = None if peeks else work.per_block
        per_block = split(known, blocks * layout.per_block_width(block))

        def run_chunk(i: int) -> None:
            with torch.no_grad():
                state = [array[i] for array in arrays]
                if peeks:
                    state = [array.clone() for array in state]
                if grads:
                    passes.take_host_step(state, grads[i], step, block, work.first + i * chunk)
                known = per_block[i] if per_block else None
                passes.publish(publish, state, block, published[i], known)

        list(self._pool.map(run_chunk, range(len(published))))

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        decode(as_tensor(codes), as_tensor(scales), block_size, as_tensor(values))

    def touch(
        self, array: Array, per_block: int, block_size: int, chunk_numel: int | None = None
    ) -> None:
        """See the base class; in the calling thread."""
        as_tensor(array).neg_().neg_()


def _divide_nothing() -> None:
    """Let torch run each operation of this thread on it alone."""
    torch.get_num_threads()  # the first call of a thread sets its limit to the default
    torch.set_num_threads(1)
