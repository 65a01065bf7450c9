"""Positions of a group's parameters in its flat buffer."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed_ext.flatten.plan import flat_numel


@dataclass(frozen=True)
class Segment:
    """One parameter's elements of the flat buffer: ``flat[start:start + numel].view(shape)``."""

    parameter: torch.Tensor
    shape: torch.Size
    start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of a segment within a given range of the flat buffer.

    Attributes:
        start: index of its first element in the parameter.
        flat_start: index of its first element in the flat buffer.
    """

    segment: Segment
    start: int
    flat_start: int
    numel: int

    @property
    def elements(self) -> torch.Tensor:
        """The piece's elements of the parameter, 1-D; a copy if the parameter is not contiguous."""
        values = self.segment.parameter.detach().reshape(-1)
        return values[self.start : self.start + self.numel]


@dataclass(frozen=True)
class GroupLayout:
    """Layout of one parameter group's flat buffer: segments in order, with zeros as padding between
    and after them.

    Attributes:
        segments: the parameters in buffer order (after any round-robin reordering).
        numel: elements of the flat buffer, including padding; a multiple of the number of ranks.
    """

    segments: tuple[Segment, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, parameters: Sequence[torch.Tensor], paddings: Sequence[int], alignment: int
    ) -> GroupLayout:
        """Lay out `parameters` in order, each followed by its padding, in elements; pad all to a
        multiple of `alignment`."""
        segments, offset = [], 0
        for parameter, padding in zip(parameters, paddings, strict=True):
            segments.append(Segment(parameter, parameter.shape, offset, parameter.numel()))
            offset += parameter.numel() + padding
        numel = flat_numel(offset, alignment)
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
        return cls(tuple(segments), numel, dtype, parameters[0].device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of the parameters within ``flat[start:stop]``; gaps are padding."""
        before = bisect.bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        for index in range(max(0, before), len(self.segments)):
            segment = self.segments[index]
            if segment.start >= stop:
                break
            first, last = max(start, segment.start), min(stop, segment.start + segment.numel)
            if first < last:
                yield Piece(segment, first - segment.start, first, last - first)

    def pack(self, out: torch.Tensor, start: int) -> None:
        """Write elements ``[start, start + len(out))`` of the flat buffer, padding zeros too, into
        `out` (1-D)."""
        done = 0
        for piece in self.pieces(start, start + out.numel()):
            at = piece.flat_start - start
            out[done:at].zero_()
            target = out[at : at + piece.numel]
            if piece.numel == piece.segment.numel:
                source = piece.segment.parameter.detach()
                target.view(piece.segment.shape).copy_(source, non_blocking=True)
            else:
                target.copy_(piece.elements, non_blocking=True)
            done = at + piece.numel
        out[done:].zero_()

    def release(self) -> None:
        """Free the parameters' storage; they are empty until they get new storage."""
        for segment in self.segments:
            segment.parameter.data = torch.empty(
                0, dtype=segment.parameter.dtype, device=self.device
            )
