"""The kernels' arithmetic in torch operations: their definition, and the fallback if no kernel can
run.

Large arrays are processed in chunks of whole blocks, so temporaries are small for any size of
array; on the CPU they also stay in a core's L2 cache. Each operation rounds once in fp32: no
`lerp`, `addcmul`, `add` with a factor, division by a number or torch's `sqrt`, which round
differently on different devices. A 16-bit result is rounded once, when it is stored. So results
depend neither on the chunks nor on the number of threads, and equal those of the kernels bitwise.
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
from dataclasses import astuple, dataclass

import torch

from deepspeed_ext.zenflow.plan.chunks import ACCELERATOR_CHUNK_NUMEL, HOST_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from deepspeed_ext.zenflow.worker.kernel.roots import root
from deepspeed_ext.zenflow.worker.kernel.rounding import HASH_FACTORS, HASH_SHIFTS

__all__ = [
    "CLAMP",
    "Chunks",
    "AdamConstants",
    "advance_moments",
    "bias_correction",
    "chunk_numel",
    "predict",
    "share_step",
    "update",
]

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element
that dominates it."""

_CHUNK_NUMEL = {"cpu": HOST_CHUNK_NUMEL}

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


@dataclass(frozen=True)
class AdamConstants:
    """The numbers of one Adam step.

    Attributes:
        grad_scale: factor of the gradient.
        lr, beta1, beta2, eps: Adam's.
        weight1, weight2: 1 - beta1 and 1 - beta2.
        l2: weight decay that is added to the gradient; 0: none.
        decay: factor of p under decoupled weight decay; 1: none.
        correction_beta1, correction_beta2: the betas of the bias corrections; 0: none.
    """

    grad_scale: float
    lr: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    eps: float
    l2: float
    decay: float
    correction_beta1: float
    correction_beta2: float

    def of_kernel(self) -> tuple[float, ...]:
        """All but the bias corrections' betas, in order."""
        return astuple(self)[:-2]

    @classmethod
    def of(cls, step: AdamStep) -> AdamConstants:
        """The numbers of `step`."""
        correction_beta1, correction_beta2 = step.correction_betas
        return cls(
            grad_scale=step.grad_scale,
            lr=step.lr,
            beta1=step.beta1,
            weight1=1.0 - step.beta1,
            beta2=step.beta2,
            weight2=1.0 - step.beta2,
            eps=step.eps,
            l2=0.0 if step.decoupled else step.weight_decay,
            decay=1.0 - step.lr * step.weight_decay if step.decoupled else 1.0,
            correction_beta1=correction_beta1,
            correction_beta2=correction_beta2,
        )


def bias_correction(updates: int, constants: AdamConstants) -> tuple[float, float]:
    """``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` with the betas of the bias corrections and t =
    `updates`, at least 1; values of fp32. By expm1: for small exponents, the subtraction would lose
    digits to cancellation."""
    first, second = (
        _complement(beta, updates)
        for beta in (constants.correction_beta1, constants.correction_beta2)
    )
    return float(first), float(root(second))


def _complement(beta: float, updates: int) -> torch.Tensor:
    """``1 - beta ** updates``, fp32 [1]."""
    exponent = torch.tensor([updates], dtype=torch.float64, device="cpu")
    exponent.mul_(math.log(beta) if beta else -math.inf)
    return exponent.expm1_().neg_().float()


@torch.no_grad()
def share_step(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    updates: int,
    constants: AdamConstants,
) -> None:
    """See `kernels.share_step`."""
    first, second = (
        torch.full((1, 1), value, dtype=torch.float32, device=p.device)
        for value in bias_correction(updates, constants)
    )
    rows, (p1, m1, v1, g1) = p.shape[1], (each.view(-1) for each in (p, m, v, grad))
    for part in Chunks(grad.numel(), rows, grad.device, 2):
        state, temporaries = (part.of(p1), part.of(m1), part.of(v1)), part.temporary
        advance_moments(*state, part.of(g1), constants, temporaries(0), temporaries(1))
        update(*state, first, second, constants, temporaries(0), temporaries(1))
    weights.copy_(p)


def advance_moments(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    c: AdamConstants,
    g: torch.Tensor,
    other: torch.Tensor,
) -> None:
    """The part of `share_step` before the update, of a chunk; `g` and `other` are temporaries."""
    g.copy_(grad).mul_(c.grad_scale)
    if c.l2:
        g.add_(torch.mul(p, c.l2, out=other))
    m.mul_(c.beta1).add_(torch.mul(g, c.weight1, out=other))
    v.mul_(c.beta2).add_(torch.mul(g, c.weight2, out=other).mul_(g))


def update(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    correction1: torch.Tensor,
    correction2_sqrt: torch.Tensor,
    c: AdamConstants,
    g: torch.Tensor,
    other: torch.Tensor,
) -> None:
    """The rest of `share_step`, of a chunk; `g` and `other` are temporaries."""
    denominator = root(v, out=other).div_(correction2_sqrt).add_(c.eps)
    change = torch.div(m, correction1, out=g).mul_(-c.lr).div_(denominator)
    if c.decay != 1.0:
        p.mul_(c.decay)
    p.add_(change)
