"""Where each parameter of a group lies in the group's flat buffer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["GroupLayout", "Piece", "Segment"]


@dataclass(frozen=True)
class Segment:
    """One parameter's run of elements in the flat buffer: ``flat[start:start + numel].view(shape)``."""

    parameter: torch.Tensor
    shape: torch.Size
    start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of a segment that lies in a given range of the flat buffer.

    Attributes:
        segment: the parameter that it belongs to.
        start: first element, counted from the parameter's first.
        flat_start: first element, counted from the flat buffer's first.
        numel: number of elements.
    """

    segment: Segment
    start: int
    flat_start: int
    numel: int


@dataclass(frozen=True)
class GroupLayout:
    """The flat buffer of one parameter group: segments in order, zeros between and after them.

    Attributes:
        segments: the parameters in the order in which they are laid out (after any round-robin reordering).
        numel: elements of the flat buffer, padding included; a multiple of the number of ranks.
        dtype: dtype of the flat buffer.
        device: where the parameters live and the flat buffer will.
    """

    segments: tuple[Segment, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], paddings: Sequence[int], alignment: int) -> GroupLayout:
        """Lay out `parameters` in order, each followed by its padding, the whole padded to `alignment` elements."""
        segments, offset = [], 0
        for parameter, padding in zip(parameters, paddings, strict=True):
            segments.append(Segment(parameter, parameter.shape, offset, parameter.numel()))
            offset += parameter.numel() + padding
        numel = -(-offset // alignment) * alignment
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
        return cls(tuple(segments), numel, dtype, parameters[0].device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of the parameters within ``flat[start:stop]``, in order; gaps between them are padding."""
        for segment in self.segments:
            first, last = max(start, segment.start), min(stop, segment.start + segment.numel)
            if first < last:
                yield Piece(segment, first - segment.start, first, last - first)

    def pack(self, out: torch.Tensor, start: int) -> None:
        """Write elements ``[start, start + len(out))`` of the flat buffer into `out`, padding zeros included."""
        done = 0
        for piece in self.pieces(start, start + out.numel()):
            at = piece.flat_start - start
            out[done:at].zero_()
            target = out[at : at + piece.numel]
            source = piece.segment.parameter.detach()
            if piece.numel == piece.segment.numel:
                target.view(piece.segment.shape).copy_(source, non_blocking=True)
            else:
                target.copy_(source.reshape(-1)[piece.start : piece.start + piece.numel], non_blocking=True)
            done = at + piece.numel
        out[done:].zero_()

    def release(self) -> None:
        """Give up the parameters' own storage; they are empty until they are pointed at new storage."""
        for segment in self.segments:
            segment.parameter.data = torch.empty(0, dtype=segment.parameter.dtype, device=self.device)
