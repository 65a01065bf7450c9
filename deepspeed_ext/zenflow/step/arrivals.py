"""Writes exact weights as they arrive from the worker, chunk by chunk, inside a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.transfers.inside_step import Transfers
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["WeightArrivals"]


class WeightArrivals:
    """One rank's weights that the step itself waits for. `Stream` has those of which it does not.

    Attributes:
        partitions: in order; set before the first step.
    """

    are_due = are_awaited = False
    """No weights are on their way after a step."""

    def __init__(self, transfers: Transfers, metrics: Metrics) -> None:
        self.partitions: Sequence[Partition] = ()
        self._transfers = transfers
        self._metrics = metrics
        self._awaited: list[tuple[int, Span]] = []

    def expect(self, indices: Iterable[int]) -> None:
        """Register that these partitions' weights will be copied from y, before their tasks
        depart."""
        self._awaited += self._transfers.in_order(indices)

    def complete(self, within: Patience, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Wait for the weights and write them, for work on the current stream.

        Raises:
            WorkerError: the worker has failed.
        """
        while self._awaited:
            index, span = self._awaited[0]
            partition = self.partitions[index]
            self._metrics.bytes_up += partition.take_published(self._transfers, span, within)
            del self._awaited[0]

    def put_first(self, parts: Iterable[tuple[int, Span]]) -> None:
        """A step waits for all weights, so none go first."""

    def free(self, index: int, span: Span, within: Patience) -> None:
        """The worker has read all gradients before the next one is taken."""

    def lose(self, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Fill weights that can no longer arrive with NaN; see Note: [lost weights]."""
        for index, span in self._awaited:
            weights = self.partitions[index].weights()
            with torch.no_grad():
                weights[slice(*span)].fill_(math.nan)
        self._awaited.clear()
