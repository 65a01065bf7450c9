"""Moments of 16 or 8 bits in torch operations: rounds them to bfloat16, or to 8-bit codes and back
(defined in `rounding`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout
from deepspeed_ext.zenflow.worker.kernel.roots import root
from deepspeed_ext.zenflow.worker.kernel.rounding import (
    CODES,
    HASH_FACTORS,
    HASH_SHIFTS,
    MOST_SCALE,
    NEAREST,
    NOT_FINITE,
    WORD,
    rounding_key,
)

__all__ = [
    "decode",
    "encode",
    "loaded",
    "round_moments",
    "step_in_fp32",
    "store",
]


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
) -> None:
    """Write m and v of `loaded`, which are rounded already, to `stored`."""
    for moment, target in zip(moments, stored, strict=True):
        if not scales and target is not moment:
            target.copy_(moment)
    for moment, codes, of_blocks in zip(moments, stored, scales, strict=False):
        encode(moment, codes, of_blocks, block_size)


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
        if kept is not moment:
            moment.copy_(kept)


def round_moments(
    m: torch.Tensor, v: torch.Tensor, dtype: str, block_size: int, step: int, first: int
) -> None:
    """Round m and v in place to what `dtype` can hold, as an update does.

    Args:
        m, v: 1-D fp32 [n], on one device.
        dtype: ``float32``, ``bfloat16`` or ``int8``.
        block_size: elements per block with one scale, for ``int8``.
        step: number of the update.
        first: number of their first element in its partition.
    """
    if dtype == "float32":
        return
    for moment, up_by, code_dtype in zip(
        (m, v), _random_halves(step, first, m.numel(), m.device), CODES, strict=True
    ):
        if dtype == "bfloat16":
            _round_to_bfloat16(moment, up_by)
        else:
            like = partial(torch.empty, device=moment.device)
            codes = like(moment.numel(), dtype=getattr(torch, code_dtype))
            scales = like(-(-moment.numel() // block_size), dtype=torch.uint8)
            encode(moment, codes, scales, block_size, up_by)
            decode(codes, scales, block_size, moment)


def _random_halves(
    step: int, first: int, numel: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The random numbers, below 2^16, that an update rounds m and v with.

    Args:
        step: number of the update.
        first: number of the first element in its partition.
        numel: n.
        device: device of the results.

    Returns:
        Both for each element, int64 [n].
    """
    number = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    random = number.add_(rounding_key(step)).bitwise_and_(WORD)
    for shift, factor in zip(HASH_SHIFTS, (*HASH_FACTORS, 1), strict=True):
        random.bitwise_xor_(random >> shift).mul_(factor).bitwise_and_(WORD)
    return random & 0xFFFF, random >> 16


def _round_to_bfloat16(moment: torch.Tensor, up_by: torch.Tensor) -> None:
    """Round a moment to values of bfloat16 in place.

    Args:
        moment: 1-D fp32 [n].
        up_by: random numbers below 2^16, int64 [n].
    """
    is_nan = moment.isnan()
    moment.view(torch.int32).add_(up_by.to(torch.int32)).bitwise_and_(-0x10000)
    moment.masked_fill_(is_nan, float("nan"))


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
    kind = CODES[str(codes.dtype).removeprefix("torch.")]
    x = _in_blocks(values, block_size)
    largest = (x.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(1)
    stored = ((largest.long() + (0x7FFFFF - kind.mantissa)) >> 23) - kind.exponent
    is_finite = stored <= MOST_SCALE
    scales.copy_(torch.where(is_finite, stored.clamp(min=1), NOT_FINITE))
    unit = _units(scales)[:, None]
    scaled = torch.where(is_finite[:, None], x, 0.0).abs().div_(unit).nan_to_num_(0.0)
    k = root(scaled).floor_()
    up = NEAREST if up_by is None else _in_blocks(up_by.float(), block_size)
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
    k = _in_blocks(codes, block_size).float()
    k.mul_(k.abs()).mul_(_units(scales)[:, None])
    values.copy_(k.view(-1)[: codes.numel()])


def _in_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """View as [blocks, block_size], with a shorter last block padded with zeros."""
    missing = -values.numel() % block_size
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(
        -1, block_size
    )


def _units(scales: torch.Tensor) -> torch.Tensor:
    """The scales as factors, fp32."""
    factors = (scales.to(torch.int32) << 23).view(torch.float32)
    return factors.masked_fill(scales == NOT_FINITE, float("nan"))
