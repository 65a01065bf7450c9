"""Remembers in which order forward uses the chunks of a rank's partitions."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["OrderOfUse"]


class OrderOfUse:
    """The order in which the next forward will probably use chunks: that of the last one.

    Copies and passes follow it, so what is needed first arrives first. It may be wrong, as after a
    branch of the model: who needs a chunk waits for it, so a wrong order only takes time. Ranks may
    have different orders.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._noted: dict[tuple[int, int], int] = {}

    def note(self, index: int, begin: int) -> None:
        """Note that a chunk of partition `index` is used now; only the first use counts."""
        self._noted.setdefault((index, begin), len(self._noted))

    def turn(self) -> None:
        """Use what has been noted from now on, if anything has, and note anew."""
        if self._noted:
            self._places, self._noted = self._noted, {}

    def sorted(self, chunks: Iterable[tuple[int, Span]]) -> list[tuple[int, Span]]:
        """Partitions and spans of chunks in this order; then those that were not used, in their own
        order."""
        last = len(self._places)
        return sorted(
            chunks, key=lambda each: (self._places.get((each[0], each[1].begin), last), each)
        )
