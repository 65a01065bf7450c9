"""Cuts partitions into chunks, and orders them as the forward uses them. Plain values, no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from deepspeed_ext.zenflow.worker.messages import Span

Key = tuple[int, int]
"""A partition and the first element of a chunk of it."""


_FIRST_CHANGE, _LEAST_CHANGE = 0.25, 1 / 32
_NEGLIGIBLE = 0.01
"""Waits below this part of a step change nothing."""


class ChunkOrder:
    """The chunks of partitions, in the order in which the last forward used them.

    A wrong order, as after another branch of the model, only costs time.

    Note: [weights that go first]
    What is read without a wait, such as persistent parameters of stage 3, is complete when the step
    returns. `put_first` makes chunks of their own of it, which are small and travel before all
    others; otherwise a step would wait for every chunk that holds a norm.

    Note: [how many chunks are peeked at]
    A peek lets weights come earlier, and its pass follows behind backward, which waits for it. Let
    the passes take P, peeks a P, the forward F and backward B. If the fraction f is peeked at, the
    last weights come after P - f (1 - a) P and all passes end after P + f a P, so the forward is
    late by P - f (1 - a) P - F, and the step by at least P + f a P - F - B. The greater of the two
    is least where they are equal, at f = B / P: peek at what backward can hide the passes of.
    Neither is known, so f follows the waits: less where steps wait for passes, more where they wait
    for weights alone. Ranks need not agree: weights are the same to the bit.

    Args:
        numels: elements of each partition.
        chunk_numel: elements of a chunk, whole blocks; the last chunk of a partition may be
            shorter.
    """

    def __init__(self, numels: Sequence[int], block_size: int, chunk_numel: int) -> None:
        self._numels, self._block_size, self._chunk_numel = numels, block_size, chunk_numel
        self._spans = [list(split(Span(0, numel), chunk_numel)) for numel in numels]
        self._first: set[Key] = set()
        self._uses: dict[Key, int] = {}  # place of each chunk in the last forward
        self._noted: dict[Key, int] = {}  # and in this one so far
        self._fraction, self._change = 1.0, _FIRST_CHANGE

    def of(self, index: int) -> list[Span]:
        """The chunks of a partition, in the order of their elements."""
        return self._spans[index]

    def touched(self, parts: Iterable[tuple[int, Span]]) -> Iterator[Key]:
        """The chunks that have elements of these spans of partitions."""
        for index, span in parts:
            chunks = self._spans[index]
            at = max(0, bisect_right(chunks, span.begin, key=lambda chunk: chunk.begin) - 1)
            for chunk in chunks[at:]:
                if chunk.begin >= span.end:
                    break
                if chunk.end > span.begin:
                    yield index, chunk.begin

    def in_order(self, indices: Iterable[int]) -> list[tuple[int, Span]]:
        """The chunks of partitions: first ones, then by their use, then unused ones."""
        last = len(self._uses)

        def place(chunk: tuple[int, Span]) -> tuple[bool, int, int, int]:
            index, span = chunk
            key = index, span.begin
            return key not in self._first, self._uses.get(key, last), *key

        return sorted(((i, span) for i in indices for span in self._spans[i]), key=place)

    def note_use(self, key: Key) -> None:
        """The present forward uses this chunk."""
        self._noted.setdefault(key, len(self._noted))

    def end_forward(self) -> None:
        """From now on the order is that of the uses that were noted, if any were."""
        if self._noted:
            self._uses, self._noted = self._noted, {}

    def peeked(self, count: int) -> int:
        """How many of `count` chunks are peeked at, from the first one on; see Note: [how many
        chunks are peeked at]."""
        return round(self._fraction * count)

    def follow(self, for_weights: float, for_passes: float, whole: float) -> None:
        """Adjust that number to some steps.

        Args:
            for_weights: seconds for which the accelerator waited for weights.
            for_passes: seconds for which it waited for passes, before a gradient could take its
                slot.
            whole: seconds of the steps.
        """
        if max(for_weights, for_passes) <= _NEGLIGIBLE * whole:
            return
        way = 1.0 if for_passes <= _NEGLIGIBLE * whole else -1.0
        size = abs(self._change) / (1.0 if way * self._change > 0.0 else 2.0)
        self._change = way * max(_LEAST_CHANGE, size)
        self._fraction = min(1.0, max(0.0, self._fraction + self._change))

    def put_first(self, parts: Iterable[tuple[int, Span]]) -> None:
        """Let elements of partitions travel before all others, in every step; see Note: [weights
        that go first]. Call it before the first step."""
        wanted: dict[int, list[Span]] = {}
        for index, span in sorted(parts):
            numel, size = self._numels[index], self._block_size
            begin, end = span.begin // size * size, min(numel, -(-span.end // size) * size)
            found = wanted.setdefault(index, [])
            if found and begin <= found[-1].end:
                begin = found.pop().begin
            if begin < end:
                found.append(Span(begin, end))
        for index, spans in wanted.items():
            first = [part for span in spans for part in split(span, self._chunk_numel)]
            chunks = [part for whole in self._spans[index] for part in _around(whole, first)]
            self._spans[index] = sorted([*first, *chunks])
            self._first |= {(index, span.begin) for span in first}


def split(whole: Span, most: int) -> Iterator[Span]:
    """Parts of at most `most` elements, in order."""
    for begin in range(whole.begin, whole.end, most):
        yield Span(begin, min(begin + most, whole.end))


def _around(whole: Span, taken: Sequence[Span]) -> Iterator[Span]:
    """What `taken`, in order, leaves of a span."""
    begin = whole.begin
    for each in taken:
        if each.begin < whole.end and each.end > begin:
            if begin < each.begin:
                yield Span(begin, each.begin)
            begin = each.end
    if begin < whole.end:
        yield Span(begin, whole.end)
