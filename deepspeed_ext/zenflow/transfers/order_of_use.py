"""Remembers the order in which forward uses the chunks of a rank's partitions."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["OrderOfUse"]


class OrderOfUse:
    """Predicts the order in which the next forward uses chunks: that of the last one.

    Copies and passes follow it, so what is needed first arrives first. A wrong order, as after
    another branch of the model, only costs time: whoever needs a chunk waits for it. Ranks may have
    different orders.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._noted: dict[tuple[int, int], int] = {}

    def note(self, index: int, begin: int) -> None:
        """Record that a chunk of partition `index` is used now; only the first use counts."""
        self._noted.setdefault((index, begin), len(self._noted))

    def turn(self) -> None:
        """Start a new round: use the recorded order, if there is any, and record again."""
        if self._noted:
            self._places, self._noted = self._noted, {}

    def sorted(self, chunks: Iterable[tuple[int, Span]]) -> list[tuple[int, Span]]:
        """Sort chunks, as pairs of partition and span, in this order, unused ones last."""
        last = len(self._places)
        return sorted(
            chunks, key=lambda each: (self._places.get((each[0], each[1].begin), last), each)
        )
