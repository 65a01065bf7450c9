"""Writes exact weights as they arrive from the worker, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.transfers.inside_step import Transfers
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["WeightArrivals"]

_Key = tuple[int, int]
"""A partition and the first element of a chunk of it."""


class WeightArrivals:
    """One rank's weights on their way: those of chunks that departed with exact steps and whose y
    has not been written to the weights yet.

    Note: [weights on their way]
    Until a chunk has arrived, its weights are those of the step before. So whatever reads or writes
    weights first calls `complete` through `WorkerLink`: the next step, saves, loads and all else
    that waits for the worker complete everything, a gather of parameters only their chunks. Each
    call makes the current stream wait for the copies to the weights, because another stream may
    have launched them: DeepSpeed gathers on its own stream.

    Note: [lost weights]
    If a worker fails between two steps, its rank must not raise alone, and its old weights look
    right. So weights that can no longer arrive become NaN, until all ranks raise the error together
    (see Note: [an error of one rank]). They count as on their way until they are used, as on the
    other ranks: stage 3 prefetches, which is a collective, only while none are.

    Attributes:
        partitions: in order; set before the first step.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.partitions: Sequence[Partition] = ()
        self._metrics = metrics
        self._awaited: dict[_Key, Span] = {}
        self._written: dict[_Key, Any] = {}  # events after the copies
        self._lost: set[_Key] = set()  # of those awaited
        self._has_streams = not get_accelerator().is_synchronized_device()

    @property
    def are_due(self) -> bool:
        """Whether any weights are on their way, or some stream may have to wait for their
        copies."""
        return bool(self._awaited or self._written)

    @property
    def are_awaited(self) -> bool:
        """Whether any weights are on their way."""
        return bool(self._awaited)

    def expect(self, transfers: Transfers, indices: Iterable[int]) -> None:
        """Register that these partitions' weights will be copied from y, before their tasks
        depart."""
        for index, span in transfers.in_order(indices):
            self._awaited[index, span.begin] = span

    def complete(
        self,
        transfers: Transfers,
        within: Patience,
        parts: Iterable[tuple[int, Span]] | None = None,
    ) -> None:
        """Wait for weights, write them, and order work on the current stream after that.

        Args:
            within: longest wait in all.
            parts: partitions, and spans of their elements, that are used now; None: everything.

        Raises:
            WorkerError: the worker has failed.
        """
        if parts is None:
            wanted = [*self._awaited, *self._written]
            transfers.order.turn()
        else:
            wanted = list(self._chunks_of(transfers, parts))
        for key in wanted:
            if (span := self._awaited.get(key)) is not None:
                if parts is not None:
                    transfers.order.note(*key)
                partition = self.partitions[key[0]]
                self._metrics.bytes_up += partition.take_published(transfers, span, within)
                self._arrived(key)
            elif (written := self._written.get(key)) is not None:
                get_accelerator().current_stream().wait_event(written)

    def _chunks_of(self, transfers: Transfers, parts: Iterable[tuple[int, Span]]) -> Iterator[_Key]:
        size = transfers.chunk_numel
        for index, span in parts:
            for begin in range(span.begin // size * size, span.end, size):
                yield index, begin

    def _arrived(self, key: _Key) -> None:
        if self._has_streams:
            self._written[key] = get_accelerator().current_stream().record_event()
        del self._awaited[key]
        self._lost.discard(key)

    def lose(self, transfers: Transfers, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Fill weights that are on their way with NaN; see Note: [lost weights].

        Args:
            parts: what is used now; None: everything.
        """
        for key in self._awaited.keys() - self._lost:
            # Held for longer than its slice: a collected engine ends here when the interpreter
            # does, and torch then aborts on a tensor that only a slice still holds.
            weights = self.partitions[key[0]].weights()
            with torch.no_grad():
                weights[slice(*self._awaited[key])].fill_(math.nan)
            self._lost.add(key)
        used = list(self._lost) if parts is None else list(self._chunks_of(transfers, parts))
        for key in used:
            if key in self._awaited:
                self._arrived(key)
