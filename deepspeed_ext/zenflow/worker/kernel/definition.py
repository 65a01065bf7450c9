"""The arithmetic of a step in torch operations: the definition of all kernels, on accelerators and
in the worker, and the fallback if none can run.

Large arrays are processed in chunks of whole blocks, so temporaries are small for any size of
array; on the CPU they also stay in a core's L2 cache. Each operation rounds once in fp32: no
`lerp`, `addcmul`, `add` with a factor, division by a number or torch's `sqrt`, which round
differently on different devices. A 16-bit result is rounded once, when it is stored. So results
depend neither on the chunks nor on the number of threads, and equal those of the device's kernels
bitwise. The native pass of Adam fuses products and sums, so its last bits differ.
Symbols are those of `deepspeed_ext.zenflow.optimizers.adam_estimator`.

Estimates are *dithered* when they are stored in 16 bits: rounded up or down at random, so that the
mean is right (Gupta et al., 2015, arXiv 1502.02551). A gradient's effect on one step is mostly less
than half a step of bfloat16, and rounding to nearest would lose it. The random number is a hash of
the value's own bits, so it needs no state and does not depend on the element's position::

    x dithered = the upper bits of (bits of x) + (the lower k bits of hash(bits of x))
    k: 16 (bf16), 13 (fp16)

A NaN stays a NaN. Numbers below the normal range of fp16 are rounded to the nearest value. The hash
is that of `deepspeed_ext.zenflow.worker.kernel.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed_ext.runtime.process import make_first_calls
from deepspeed_ext.zenflow.worker.kernel.passes import (
    ACCELERATOR_CHUNK_NUMEL,
    HOST_CHUNK_NUMEL,
    chunk_of,
)
from deepspeed_ext.zenflow.worker.kernel.rounding import HASH_FACTORS, HASH_SHIFTS

__all__ = [
    "CLAMP",
    "Chunks",
    "block_means",
    "chunk_numel",
    "predict",
]

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element
that dominates it."""

_CHUNK_NUMEL = {"cpu": HOST_CHUNK_NUMEL}

make_first_calls()

_SIGNED_FACTORS = tuple(factor - (1 << 32) if factor >> 31 else factor for factor in HASH_FACTORS)
"""As int32, whose products wrap to 32 bits."""
_CUT_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of an fp32 number that the dtype drops."""


def chunk_numel(device: torch.device, block_size: int) -> int:
    """Elements computed at once on `device`: whole blocks."""
    return chunk_of(_CHUNK_NUMEL.get(device.type, ACCELERATOR_CHUNK_NUMEL), block_size)


class Chunks:
    """Parts of 1-D arrays of n elements, each as rows of blocks [rows, block_size]; a short last
    block is a separate part. All parts share the memory for temporaries."""

    def __init__(self, n: int, block_size: int, device: torch.device, temporaries: int) -> None:
        self._n, self._block = n, block_size
        self._whole = n // block_size * block_size
        self._chunk = chunk_numel(device, block_size)
        self._temporaries = torch.empty(
            temporaries, min(self._chunk, n), dtype=torch.float32, device=device
        )

    def __iter__(self) -> Iterator[_Part]:
        for begin in range(0, self._whole, self._chunk):
            end = min(begin + self._chunk, self._whole)
            yield _Part(begin, end, self._block, self._block, self._temporaries)
        if self._whole < self._n:
            yield _Part(self._whole, self._n, self._n - self._whole, self._block, self._temporaries)


@dataclass(frozen=True)
class _Part:
    begin: int
    end: int
    row: int
    block_size: int
    temporaries: torch.Tensor

    def of(self, array: torch.Tensor) -> torch.Tensor:
        return array[self.begin : self.end].view(-1, self.row)

    def temporary(self, number: int) -> torch.Tensor:
        return self.temporaries[number, : self.end - self.begin].view(-1, self.row)

    def dithered(self, x: torch.Tensor, dtype: torch.dtype, *free: int) -> torch.Tensor:
        """`x`, one of the temporaries, dithered to values of `dtype` in place; `free` are two
        temporaries that may be overwritten."""
        if dtype not in _CUT_BITS:
            return x
        mask, bits = (1 << _CUT_BITS[dtype]) - 1, x.view(torch.int32)
        random, shifted = (self.temporary(number).view(torch.int32) for number in free)
        random.copy_(bits)
        for shift, factor in zip(HASH_SHIFTS, (*_SIGNED_FACTORS, None), strict=True):
            torch.bitwise_right_shift(random, shift, out=shifted).bitwise_and_(
                (1 << (32 - shift)) - 1
            )
            random.bitwise_xor_(shifted)
            if factor is not None:
                random.mul_(factor)
        is_nan = shifted.view(-1).view(torch.bool)[: x.numel()].view_as(x)
        torch.ne(x, x, out=is_nan)
        bits.add_(random.bitwise_and_(mask)).bitwise_and_(~mask)
        return x.masked_fill_(is_nan, math.nan)

    def normalized(
        self, grad: torch.Tensor, inverse: torch.Tensor, grad_scale: float
    ) -> torch.Tensor:
        """q, in temporary 0."""
        factor = (
            inverse[self.begin // self.block_size : -(-self.end // self.block_size)] * grad_scale
        )
        return self.temporary(0).copy_(self.of(grad)).mul_(factor[:, None]).clamp_(-CLAMP, CLAMP)


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
    temporaries = 3 if weights.dtype in _CUT_BITS else 1
    for part in Chunks(grad.numel(), block_size, grad.device, temporaries):
        moved = part.normalized(grad, inverse, grad_scale).mul_(-coefficient)
        arrived = part.of(published).to(grad.device, non_blocking=True)
        part.of(weights).copy_(part.dithered(moved.add_(arrived), weights.dtype, 1, 2))


def block_means(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """The mean of each block of `values`, 1-D; the last block may be shorter."""
    whole = values.numel() // block_size * block_size
    means = values[:whole].view(-1, block_size).mean(1)
    rest = values[whole:]
    return torch.cat([means, rest.mean().view(1)]) if rest.numel() else means
