"""How many messages a step sends to the optimizer process, and which tasks share one."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from tests.support.streams import plan_of, stream_of

CHUNK = 8


class Process:
    """Notes what is submitted, and what is waited for."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, Span | None]]] = []
        self.awaited: list[int] = []

    def submit(self, tasks: list[WorkerTask]) -> int:
        self.sent.append([(task.partition, task.span) for task in tasks])
        return len(self.sent)

    def wait_for(self, number: int, **how: Any) -> None:
        self.awaited.append(number)


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        ([2] * 3, [[(0, Span(0, 2)), (1, Span(0, 2)), (2, Span(0, 2))]]),
        ([6, 4, 2], [[(0, Span(0, 6))], [(1, Span(0, 4)), (2, Span(0, 2))]]),
        ([10, 4], [[(0, Span(0, 8))], [(0, Span(8, 10)), (1, Span(0, 4))]]),
        ([8, 8], [[(0, Span(0, 8))], [(1, Span(0, 8))]]),
        ([], []),
    ],
    ids=["small ones together", "up to a chunk", "the rest of one and the next", "whole", "none"],
)
def test_a_message_holds_the_tasks_of_one_chunk_of_elements(
    numels: list[int], expected: list[list[tuple[int, Span]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", CHUNK)
    process: Any = Process()
    stream, *_ = stream_of(plan_of(numels, "cpu", block_size=2), process)
    stream.expect(range(len(numels)))
    stream.depart([WorkerTask(i, 0, ANY) for i in range(len(numels))], {})
    assert process.sent == expected
    for number, message in enumerate(process.sent, 1):  # each chunk waits for its own message
        for part in message:
            stream.complete(None, [part])
            assert process.awaited.pop() == number
