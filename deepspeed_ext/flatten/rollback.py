"""Restores freed parameters after flattening failed: their storage and their values."""

from __future__ import annotations

import torch

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.flatten.layout import GroupLayout, Piece, Segment
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, together

__all__ = ["restore_parameters"]

_BUFFER_BYTES = 1 << 20


def restore_parameters(layout: GroupLayout, ranks: RankGroup, values: torch.Tensor) -> None:
    """Allocate storage for every parameter and fill it from the ranks' slices. A collective.

    If accelerator memory no longer suffices, because something else has taken it, the remaining
    parameters go to host memory, with a warning.

    Args:
        ranks: the ranks, each of which holds a slice.
        values: this rank's slice of the flat buffer; 1-D, on the accelerator or the host.

    Raises:
        OutOfMemoryError: on every rank, if a parameter of any rank fits nowhere; the values are
            lost.
    """
    with together(ranks, OutOfMemoryError):
        buffer = _broadcast_buffer(layout, ranks)
        moved = [segment for segment in layout.segments if not _allocate(segment, layout.device)]
        if moved:
            logger.warning(
                f"rank {ranks.global_rank(ranks.rank)}: {len(moved)} of {len(layout.segments)} "
                "parameters no longer fit into accelerator memory after flattening failed; they "
                "are now in host memory, intact"
            )
    buffer = buffer[: ranks.minimum(buffer.numel())[0]]
    for owner in range(ranks.size):
        first = owner * values.numel()
        for piece in layout.pieces(first, first + values.numel()):
            _broadcast_piece(piece, values, piece.flat_start - first, buffer, ranks, owner)


def _broadcast_buffer(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor:
    """Allocate the buffer that the ranks broadcast values through; 1-D, on the accelerator."""
    try:
        return allocation.accelerator_empty(
            _BUFFER_BYTES // layout.dtype.itemsize, layout.dtype, layout.device
        )
    except Exception as error:
        if ranks.scratch is None or not allocation.is_out_of_memory(error):
            raise
        return ranks.scratch.view(layout.dtype)  # a few elements only: slow, but nothing is lost


def _allocate(segment: Segment, device: torch.device) -> bool:
    """Allocate a parameter's storage; return False if `device` has no memory for it and it is on
    the host instead."""
    parameter = segment.parameter
    try:
        parameter.data = allocation.accelerator_empty(segment.numel, parameter.dtype, device).view(
            segment.shape
        )
    except Exception as error:
        if not allocation.is_out_of_memory(error):
            raise
    else:
        return True
    parameter.data = allocation.host_empty(segment.numel, parameter.dtype, pin=False).view(
        segment.shape
    )
    return False


def _broadcast_piece(
    piece: Piece,
    values: torch.Tensor,
    start: int,
    buffer: torch.Tensor,
    ranks: RankGroup,
    owner: int,
) -> None:
    """Broadcast a piece from the owner's slice, where it begins at `start`, into the parameter on
    all ranks."""
    target = piece.segment.parameter.detach().view(-1)[piece.start : piece.start + piece.numel]
    if ranks.size == 1:
        target.copy_(values[start : start + piece.numel])
        return
    for part, first in zip(
        target.split(buffer.numel()), range(start, start + piece.numel, buffer.numel()), strict=True
    ):
        chunk = buffer[: part.numel()]
        if owner == ranks.rank:
            chunk.copy_(values[first : first + part.numel()])
        dist.broadcast(chunk, src=ranks.global_rank(owner), group=ranks.group)
        part.copy_(chunk)
