"""Knows which weights the worker has yet to give, chunk by chunk, and who may wait for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from deepspeed_ext.zenflow.plan.chunks import CONVERTED_NUMEL
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["GivenWeights", "Key"]

Key = tuple[int, int]
"""A partition and the first element of a chunk of it."""


class GivenWeights(ABC):
    """Weights that are copied from what the worker publishes. Here the step itself waits for all of
    them; `step.stream.Stream` waits where they are used.

    Note: [lost weights]
    If a worker fails between two steps, its rank must not raise alone, and its old weights look
    right. So weights that can no longer come become NaN, until all ranks raise the error together
    (see Note: [an error of one rank]). They count as on their way until they are used, as on the
    other ranks: stage 3 prefetches, which is a collective, only while none are.

    Attributes:
        weights: each returns a partition's weights, 1-D [n]; set before the first step.
    """

    def __init__(self) -> None:
        self.weights: Sequence[Callable[[], torch.Tensor]] = ()
        self._awaited: dict[Key, Span] = {}  # chunks whose weights are on their way
        self._lost: set[Key] = set()  # of those awaited
        self._spans: dict[int, list[Span]] = {}  # chunks of each partition

    @abstractmethod
    def _cut(self, index: int) -> list[Span]:
        """Cut a partition into chunks of whole blocks, in the order of their elements."""

    @abstractmethod
    def published(
        self, index: int, chunk: Span | None = None, within: Patience | None = None
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """A partition's y in parts; see `Transfers`."""

    def in_order(self, indices: Iterable[int]) -> list[tuple[int, Span]]:
        """The chunks of partitions, in the order in which they depart."""
        return [(index, span) for index in indices for span in self._chunks(index)]

    def write(self, index: int, chunk: Span | None = None, within: Patience | None = None) -> int:
        """Copy a partition's y to its weights; return the bytes of y. Arguments as for
        `published`."""
        weights, nbytes = self.weights[index](), 0
        for span, published in self.published(index, chunk, within):
            # A converting copy needs a temporary of y's dtype on the accelerator; copying in parts
            # bounds it.
            part_numel = published.numel() if published.dtype == weights.dtype else CONVERTED_NUMEL
            parts = weights[slice(*span)].split(part_numel)
            for part, y in zip(parts, published.split(part_numel), strict=True):
                part.copy_(y, non_blocking=True)
            nbytes += published.nbytes
        return nbytes

    @property
    def are_due(self) -> bool:
        """Whether `complete` has anything to do."""
        return self.are_awaited

    @property
    def are_awaited(self) -> bool:
        """Whether any weights are on their way."""
        return bool(self._awaited)

    def expect(self, indices: Iterable[int]) -> None:
        """Register that the worker will give these partitions' weights, before their tasks
        depart."""
        for index, span in self.in_order(indices):
            self._awaited[index, span.begin] = span

    def complete(
        self, within: Patience | None, parts: Iterable[tuple[int, Span]] | None = None
    ) -> int:
        """Wait for weights and write them, for work on the current stream.

        Args:
            within: longest wait in all.
            parts: partitions, and spans of their elements, that are used now; None: everything.
                `Stream` alone tells them apart.

        Returns:
            Bytes that have come.

        Raises:
            WorkerError: the worker has failed.
        """
        nbytes = 0
        for (index, begin), span in list(self._awaited.items()):
            nbytes += self.write(index, span, within)
            del self._awaited[index, begin]
        return nbytes

    def lose(self, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Fill weights that are on their way with NaN; see Note: [lost weights].

        Args:
            parts: what is used now; None: everything.
        """
        for key in self._awaited.keys() - self._lost:
            # Held for longer than its slice: a collected engine ends here when the interpreter
            # does, and torch then aborts on a tensor that only a slice still holds.
            weights = self.weights[key[0]]()
            with torch.no_grad():
                weights[slice(*self._awaited[key])].fill_(math.nan)
            self._lost.add(key)
        for key in list(self._lost) if parts is None else list(self._chunks_of(parts)):
            if key in self._awaited:
                del self._awaited[key]
                self._lost.discard(key)

    def _chunks(self, index: int) -> list[Span]:
        """The chunks of a partition, in the order of their elements."""
        if index not in self._spans:
            self._spans[index] = self._cut(index)
        return self._spans[index]

    def _chunks_of(self, parts: Iterable[tuple[int, Span]]) -> Iterator[Key]:
        for index, span in parts:
            chunks = self._chunks(index)
            at = max(0, bisect_right(chunks, span.begin, key=lambda chunk: chunk.begin) - 1)
            for chunk in chunks[at:]:
                if chunk.begin >= span.end:
                    break
                if chunk.end > span.begin:
                    yield index, chunk.begin
