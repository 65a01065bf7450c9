"""The way back from a flattening that failed: parameters that were freed get storage and values again."""

from __future__ import annotations

import torch

from deepspeed_ext import allocation
from deepspeed_ext._agreement import RankGroup, together
from deepspeed_ext._errors import OutOfMemoryError
from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import dist
from deepspeed_ext.flatten.layout import GroupLayout, Piece, Segment

__all__ = ["put_back"]

_FERRY_BYTES = 1 << 20


def put_back(layout: GroupLayout, ranks: RankGroup, values: torch.Tensor) -> None:
    """Give every parameter storage of its own again and fill it from the ranks' slices. A collective.

    Parameters that do not fit into accelerator memory any more, because something else took it meanwhile, are put into
    host memory, with a warning.

    Args:
        layout: the parameters.
        ranks: all of them hold a slice and call this.
        values: this rank's slice of the flat buffer; 1-D, on the accelerator or on the host.

    Raises:
        OutOfMemoryError: on every rank, if a parameter of any fits nowhere; its values are lost.
    """
    with together(ranks, OutOfMemoryError):
        ferry = _ferry(layout, ranks)
        moved = [segment for segment in layout.segments if not _allocate(segment, layout.device)]
        if moved:
            logger.warning(
                f"rank {ranks.global_rank(ranks.rank)}: {len(moved)} of {len(layout.segments)} parameters do not fit "
                "back into accelerator memory after a flattening that failed and are now in host memory, intact"
            )
    ferry = ferry[: ranks.minimum(ferry.numel())[0]]
    for owner in range(ranks.size):
        first = owner * values.numel()
        for piece in layout.pieces(first, first + values.numel()):
            _send(piece, values, piece.flat_start - first, ferry, ranks, owner)


def _ferry(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor:
    """The buffer through which values reach parameters, wherever those are; 1-D, on the accelerator."""
    try:
        return allocation.accelerator_empty(_FERRY_BYTES // layout.dtype.itemsize, layout.dtype, layout.device)
    except Exception as error:
        if ranks.scratch is None or not allocation.is_out_of_memory(error):
            raise
        return ranks.scratch.view(layout.dtype)  # a few elements: slow, but nothing is lost


def _allocate(segment: Segment, device: torch.device) -> bool:
    """New storage for a parameter; False if it is in host memory for want of room on `device`."""
    parameter = segment.parameter
    try:
        parameter.data = allocation.accelerator_empty(segment.numel, parameter.dtype, device).view(segment.shape)
    except Exception as error:
        if not allocation.is_out_of_memory(error):
            raise
    else:
        return True
    parameter.data = allocation.host_empty(segment.numel, parameter.dtype, pin=False).view(segment.shape)
    return False


def _send(piece: Piece, values: torch.Tensor, start: int, ferry: torch.Tensor, ranks: RankGroup, owner: int) -> None:
    """Bring a part of a parameter from the owner's slice, where it begins at `start`, to all ranks."""
    target = piece.segment.parameter.detach().view(-1)[piece.start : piece.start + piece.numel]
    if ranks.size == 1:
        target.copy_(values[start : start + piece.numel])
        return
    for part, begin in zip(target.split(ferry.numel()), range(start, start + piece.numel, ferry.numel()), strict=True):
        passing = ferry[: part.numel()]
        if owner == ranks.rank:
            passing.copy_(values[begin : begin + part.numel()])
        dist.broadcast(passing, src=ranks.global_rank(owner), group=ranks.group)
        part.copy_(passing)
