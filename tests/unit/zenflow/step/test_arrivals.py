"""Weights on their way: which chunks a use of weights completes, which copies it waits for, and
which weights are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.step import arrivals
from deepspeed_ext.zenflow.step.arrivals import WeightArrivals
from deepspeed_ext.zenflow.transfers.order_of_use import OrderOfUse
from deepspeed_ext.zenflow.worker.messages import Span

SIZE, NUMELS = 4, (8, 6)
"""Elements of a chunk, and of each partition."""
ANY: Any = None


class Transfers:
    """Chunks of partitions, in order."""

    chunk_numel = SIZE

    def __init__(self) -> None:
        self.order = OrderOfUse()

    def in_order(self, indices: Any) -> list[tuple[int, Span]]:
        return [
            (index, Span(begin, min(begin + SIZE, NUMELS[index])))
            for index in indices
            for begin in range(0, NUMELS[index], SIZE)
        ]


class Weights:
    """A partition that notes which chunks are written."""

    def __init__(self, index: int, written: list[tuple[int, Span]]) -> None:
        self.index, self._all_written = index, written
        self._weights = torch.zeros(NUMELS[index])

    def weights(self) -> torch.Tensor:
        return self._weights

    def take_published(self, transfers: Any, chunk: Span, within: Any) -> int:
        self._all_written.append((self.index, chunk))
        self._weights[slice(*chunk)] = 1.0
        return 2 * chunk.numel


class Stream:
    """Gives its events numbers, and notes those that it waits for."""

    def __init__(self) -> None:
        self.recorded, self.awaited = 0, list[int]()

    def record_event(self) -> int:
        self.recorded += 1
        return self.recorded

    def wait_event(self, event: int) -> None:
        self.awaited.append(event)


class Run:
    """Two partitions whose weights are on their way, on a device with streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.metrics = Stream(), SimpleNamespace(bytes_up=0)
        device = SimpleNamespace(
            is_synchronized_device=lambda: False, current_stream=lambda: self.stream
        )
        monkeypatch.setattr(arrivals, "get_accelerator", lambda: device)
        self.written: list[tuple[int, Span]] = []
        self.transfers: Any = Transfers()
        self.arrivals = WeightArrivals(self.metrics)  # type: ignore[arg-type]
        self.arrivals.partitions = [Weights(index, self.written) for index in (0, 1)]  # type: ignore[misc]
        self.arrivals.expect(self.transfers, [0, 1])

    def complete(self, *parts: tuple[int, Span]) -> list[tuple[int, Span]]:
        """The chunks that are written when these parts are used; no part: everything."""
        self.written.clear()
        self.arrivals.complete(self.transfers, ANY, parts or None)
        return list(self.written)

    def lost(self) -> list[list[bool]]:
        return [each.weights().isnan().tolist() for each in self.arrivals.partitions]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_use_completes_the_chunks_that_it_touches_once(run: Run) -> None:
    assert run.arrivals.are_due
    assert run.arrivals.are_awaited
    assert run.complete((0, Span(1, 4))) == [(0, Span(0, 4))]
    assert run.complete((0, Span(3, 5)), (1, Span(5, 6))) == [(0, Span(4, 8)), (1, Span(4, 6))]
    assert run.complete() == [(1, Span(0, 4))]
    assert run.metrics.bytes_up == 2 * sum(NUMELS)
    assert run.arrivals.are_due
    assert not run.arrivals.are_awaited
    run.arrivals.expect(run.transfers, [1])
    assert run.complete() == [(1, Span(0, 4)), (1, Span(4, 6))]


def test_the_order_of_uses_is_that_of_the_next_step(run: Run) -> None:
    run.complete((1, Span(4, 6)))
    run.complete((0, Span(4, 8)))
    run.complete()
    by_use = run.transfers.order.sorted(run.transfers.in_order([0, 1]))
    assert by_use[:2] == [(1, Span(4, 6)), (0, Span(4, 8))]


def test_later_uses_wait_for_the_copies_of_their_chunks_alone(run: Run) -> None:
    run.complete((1, Span(0, 4)))
    run.complete((0, Span(0, 8)))
    assert run.stream.awaited == []
    run.complete((0, Span(4, 8)))
    assert run.stream.awaited == [3]
    run.complete()
    assert run.stream.awaited == [3, 1, 2, 3]


def test_lost_weights_count_as_on_their_way_until_they_are_used(run: Run) -> None:
    run.complete((0, Span(0, 4)))
    run.arrivals.lose(run.transfers, [(1, Span(4, 6))])
    assert run.lost() == [4 * [False] + 4 * [True], 6 * [True]]
    assert run.arrivals.are_awaited
    run.arrivals.lose(run.transfers, [(0, Span(4, 8)), (1, Span(0, 6))])
    assert not run.arrivals.are_awaited
    run.arrivals.partitions[1].weights().zero_()
    run.arrivals.expect(run.transfers, [1])
    run.arrivals.lose(run.transfers)
    assert run.lost() == [4 * [False] + 4 * [True], 6 * [True]]
    assert not run.arrivals.are_awaited
