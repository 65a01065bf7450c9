"""Lets the host compute the accelerator's weights, part by part, through two page-locked buffers.

While the host computes one part, the accelerator receives the one before it and, if the old weights
are needed, sends the one after it. So of a partition, only the weights take accelerator memory and
cross the link, not the gradient or y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.chunks import UPLOAD_NUMEL
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["WeightUpload"]


class WeightUpload:
    """Two buffers of host memory, used alternately. Without streams (the CPU), weights are written
    in place.

    Args:
        most: elements of the largest partition.
        waiting: stopwatch that runs while the accelerator waits for the weights.
    """

    def __init__(self, most: int, block_size: int, waiting: Stopwatch) -> None:
        self._numel = min(most, chunk_of(UPLOAD_NUMEL, block_size))
        self._waiting = waiting
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Any] = [None, None]  # of each buffer: event after its newest copy up
        self._down: Any = None  # stream of the copies down

    def parts(
        self, weights: torch.Tensor, span: Span, *, reads: bool
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """The weights of `span` in parts of whole blocks, in order. Write a part's before the next
        one is taken.

        Args:
            weights: of the whole partition, 1-D [n], on the accelerator.
            span: the elements to write.
            reads: whether what is written depends on the old weights.

        Yields:
            The part's elements, and host memory for its weights: with the old ones if `reads`,
            otherwise undefined.
        """
        if not self._buffers:
            self._buffers = [
                allocation.host_empty(self._numel, weights.dtype, pin=True) for _ in range(2)
            ]
        starts = range(span.begin, span.end, max(1, self._numel))
        pieces = [Span(begin, min(begin + self._numel, span.end)) for begin in starts]
        fetched: Any = None
        with self._waiting.measured():
            for number, piece in enumerate(pieces):
                buffer = self._buffers[number % 2][: piece.end - piece.begin]
                if reads:
                    fetched = fetched or self._fetch(weights, piece, number)
                    old, following = fetched, pieces[number + 1 : number + 2]
                    fetched = self._fetch(weights, following[0], number + 1) if following else None
                    old.synchronize()
                elif (sent := self._sent[number % 2]) is not None:
                    sent.synchronize()
                yield piece, buffer
                weights[slice(*piece)].copy_(buffer, non_blocking=True)
                self._sent[number % 2] = streams.recorded(get_accelerator().current_stream())

    def _fetch(self, weights: torch.Tensor, piece: Span, number: int) -> Any:
        """Start the copy of old weights to their buffer, once the buffer's copy up has ended;
        return an event after the copy."""
        accelerator = get_accelerator()
        if self._down is None:
            self._down = streams.new_stream()
        # the current stream writes the weights, and sends the buffer's older ones
        self._down.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._down):
            self._buffers[number % 2][: piece.end - piece.begin].copy_(
                weights[slice(*piece)], non_blocking=True
            )
            return streams.recorded(self._down)

    @property
    def used(self) -> list[Any]:
        """Streams that may read or write a buffer."""
        return [] if self._down is None else [self._down]
