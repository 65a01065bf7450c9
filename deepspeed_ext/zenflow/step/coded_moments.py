"""Shows moments kept as 8-bit codes in fp32: to DeepSpeed, users and checkpoints.

The codes and their scales are the state, and the worker knows nothing else. Everyone else sees fp32
arrays of the arena, which take memory only while they are shown: reads see decoded values, and
writes are encoded before the next step, to the nearest value. Unwritten values give the same codes
again. A save does not show the moments: it decodes them chunk by chunk on their way to the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepspeed_ext.zenflow.plan.chunks import CODED_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.codes import decode, encode
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["CodedMoment", "CodedMoments"]


class CodedMoment(NamedTuple):
    """One moment of one partition of ZeRO, of n elements. The first of them may step on the
    accelerator; then their codes are here only while they are shown (see `AcceleratorShare`).

    Attributes:
        kind, shown_kind, partition: kinds and partition of the arena's arrays of codes and shown
            values.
        codes: int8 [n] of m, uint8 [n] of v.
        scales: uint8 [ceil(n / block_size)].
        shown: fp32 [n].
    """

    kind: str
    shown_kind: str
    partition: int
    block_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    shown: torch.Tensor

    def spans(self, numel: int) -> Iterator[Span]:
        """Runs of whole blocks, of about `numel` elements each."""
        step = chunk_of(numel, self.block_size)
        for begin in range(0, self.codes.numel(), step):
            yield Span(begin, min(begin + step, self.codes.numel()))

    def decode(self, span: Span, values: torch.Tensor) -> torch.Tensor:
        """Decode a run of whole blocks into the first elements of `values`, 1-D fp32, and return
        these."""
        values = values[: span.numel]
        decode(self.codes[slice(*span)], self._scales_of(span), self.block_size, values)
        return values

    def decoded(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 values in order, in parts, each valid until the next."""
        chunk = torch.empty(
            min(chunk_of(CODED_CHUNK_NUMEL, self.block_size), self.codes.numel()),
            dtype=torch.float32,
            device="cpu",
        )
        for span in self.spans(CODED_CHUNK_NUMEL):
            yield self.decode(span, chunk)

    def encode(self, span: Span) -> None:
        """Encode the shown values of a run of whole blocks."""
        part = slice(*span)
        encode(self.shown[part], self.codes[part], self._scales_of(span), self.block_size)

    def _scales_of(self, span: Span) -> torch.Tensor:
        return self.scales[span.begin // self.block_size : -(-span.end // self.block_size)]


class CodedMoments:
    """The moments of a rank's partitions.

    Args:
        partitions: how many there are.

    Attributes:
        is_shown: whether the shown values are the state, because they may have been written. From
            the beginning of a step, the codes are.
    """

    def __init__(self, arena: Arena, partitions: int, layout: StateLayout, block_size: int) -> None:
        self.is_shown = False
        self._has_memory = False
        self._arena = arena
        self._moments = [
            CodedMoment(
                kind,
                shown,
                index,
                block_size,
                *(arena.whole(each, index) for each in (kind, scales, shown)),
            )
            for index in range(partitions)
            for kind, scales, shown in zip(
                layout.kinds[1:], layout.scales, layout.shown, strict=True
            )
        ]

    def show(self) -> None:
        """Decode the moments, which take memory until `hide`. The arena must not be in use, and
        must hold all codes."""
        self._has_memory = self.is_shown = True
        for moment in self._moments:
            for span in moment.spans(CODED_CHUNK_NUMEL):
                moment.decode(span, moment.shown[span.begin :])

    @torch.no_grad()
    def take(self) -> None:
        """Encode what is shown, if anything is, because it may have been written."""
        if self.is_shown:
            for moment in self._moments:
                for span in moment.spans(CODED_CHUNK_NUMEL):
                    moment.encode(span)

    def hide(self) -> None:
        """Free the memory of what was shown, unless it is the state. Nothing may still read it."""
        if self._has_memory and not self.is_shown:
            self._has_memory = False
            for moment in self._moments:
                self._arena.release(moment.shown_kind, moment.partition)

    def behind(self, values: torch.Tensor) -> CodedMoment | None:
        """The moment that would be shown in `values`, a host storage, but is not decoded there
        now; else None."""
        if self.is_shown:
            return None
        return next(
            (each for each in self._moments if each.shown.data_ptr() == values.data_ptr()), None
        )
