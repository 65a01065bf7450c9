"""Streamed weights: which chunks a use completes and which copies it waits for, in which order the
worker visits them, and which weights are lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.transfers import stream
from deepspeed_ext.zenflow.transfers.chunks import ChunkOrder
from deepspeed_ext.zenflow.transfers.courier import Parcel
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from tests.support.streams import plan_of, stream_of

SIZE, NUMELS = 4, (8, 6)
"""Elements of a chunk, and of each partition."""
CHUNKS = [(0, Span(0, 4)), (0, Span(4, 8)), (1, Span(0, 4)), (1, Span(4, 6))]


class Courier:
    """Keeps what is sent; `wait` delivers everything up to the parcel that is waited for."""

    is_idle = True

    def __init__(self, *_: Any) -> None:
        self.sent: list[Parcel] = []
        self.waited: list[Any] = []

    def send(self, parcels: list[Parcel], process: Any, at_once: int | None = None) -> None:
        self.sent = list(parcels)

    def wait(self, within: Any, latch: Any) -> None:
        self.waited.append(latch)
        for parcel in self.sent:
            if not parcel.here.is_open and parcel.bring_up is not None:
                parcel.send()
                parcel.bring_up()
                parcel.here.open()
            if parcel.here is latch:
                return


class Run:
    """Two partitions, whose steps are handed over; what was peeked at is the number of its slot,
    from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "Courier", Courier)
        monkeypatch.setattr(places, "CHUNK_NUMEL", SIZE)
        self.stream, _, self.weights = stream_of(plan_of(NUMELS, "cpu", block_size=2, peeks=True))
        for number, slot in enumerate(self.stream._slots, 1):
            slot.published.fill_(number)
        self.courier: Courier = self.stream._courier  # type: ignore[assignment]

    def step(self) -> None:
        self.stream.expect([0, 1])
        self.stream.depart([WorkerTask(index, 0, ANY) for index in (0, 1)], {})

    def visits(self, *, peeks: bool) -> list[tuple[int, Span | None]]:
        tasks = [parcel.task for parcel in self.courier.sent]
        return [(t.partition, t.span) for t in tasks if t.peeks is peeks]

    def lost(self) -> list[list[bool]]:
        return [each.isnan().tolist() for each in self.weights]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_the_worker_peeks_in_the_order_of_use_and_passes_in_reverse(run: Run) -> None:
    run.step()
    assert run.visits(peeks=True) == CHUNKS
    assert run.visits(peeks=False) == CHUNKS[::-1]
    assert [parcel.task.chunk_slot for parcel in run.courier.sent] == [0, 1, 2, 3] + [None] * 4
    run.stream.complete(ANY, [(1, Span(4, 6))])
    run.stream.complete(ANY, [(0, Span(4, 8))])
    run.stream.complete(ANY)
    run.step()
    by_use = [CHUNKS[3], CHUNKS[1], CHUNKS[0], CHUNKS[2]]
    assert run.visits(peeks=True) == by_use
    assert run.visits(peeks=False) == by_use[::-1]


def test_where_backward_is_too_short_the_last_chunks_are_passed_at_once(run: Run) -> None:
    for _ in range(3):
        run.stream.chunks.follow(0.0, 1.0, 1.0)
    run.step()
    assert run.visits(peeks=True) == CHUNKS[:2]
    assert run.visits(peeks=False) == [*CHUNKS[2:], *CHUNKS[1::-1]]
    assert [parcel.task.chunk_slot for parcel in run.courier.sent] == [0, 1, 2, 3, None, None]
    assert run.stream._passed.keys() == run.stream._here.keys()


@pytest.mark.parametrize("peeks", [True, False])
def test_waits_are_measured_for_one_step(run: Run, peeks: bool) -> None:
    """Otherwise measurements of all steps would be kept."""
    run.stream._peeks = peeks
    for _ in range(3):
        run.step()
        run.stream.complete(ANY)
    assert len(run.stream._for_weights._pairs) == len(CHUNKS)


def test_what_is_read_without_a_wait_travels_first_in_chunks_of_its_own(run: Run) -> None:
    run.stream.chunks.put_first([(0, Span(3, 4)), (0, Span(4, 5)), (1, Span(5, 6))])
    run.step()
    first = [(0, Span(2, 6)), (1, Span(4, 6))]  # whole blocks of two
    assert run.visits(peeks=True) == [*first, (0, Span(0, 2)), (0, Span(6, 8)), (1, Span(0, 4))]
    run.stream.complete(ANY, [(0, Span(3, 5))])
    assert run.weights[0].tolist() == 2 * [0.0] + 4 * [1.0] + 2 * [0.0]
    run.stream.complete(ANY, [(0, Span(0, 8))])
    assert run.stream._awaited.keys() == {(1, 0), (1, 4)}


def test_a_use_completes_the_chunks_that_it_touches(run: Run) -> None:
    run.step()
    assert run.stream.are_due
    nbytes = run.stream.complete(ANY, [(0, Span(1, 4))])
    assert run.weights[0].tolist() == 4 * [1.0] + 4 * [0.0]
    nbytes += run.stream.complete(ANY, [(0, Span(3, 5)), (1, Span(5, 6))])
    assert run.stream._awaited.keys() == {(1, 0)}
    nbytes += run.stream.complete(ANY)
    assert not run.stream.awaits()
    assert nbytes == 4 * sum(NUMELS)
    assert run.weights[1].tolist() == 4 * [3.0] + 2 * [4.0]


def test_a_slot_is_free_for_the_next_gradient_only_when_its_pass_has_ended(run: Run) -> None:
    run.step()
    passes = {
        (parcel.task.partition, parcel.task.span): parcel.here for parcel in run.courier.sent[4:]
    }
    run.courier.waited.clear()
    run.stream.free(0, Span(5, 6), ANY)
    assert run.courier.waited[-1] is passes[0, Span(4, 8)]
    assert passes[0, Span(0, 4)] not in run.courier.waited
    run.courier.waited.clear()
    run.stream.free(0, Span(5, 6), ANY)
    assert run.courier.waited == [], "once is enough"


def test_a_slot_of_peeked_weights_is_taken_once_its_copy_up_has_ended(run: Run) -> None:
    run.step()
    slot = run.stream._slots[0]
    slot.free = "the event after its newest copy"
    assert slot.free in tuple(run.courier.sent[0].start_down())


def test_lost_weights_count_as_on_their_way_until_they_are_used(run: Run) -> None:
    run.step()
    run.stream.complete(ANY, [(0, Span(0, 4))])
    run.stream.lose([(1, Span(4, 6))])
    assert run.lost() == [4 * [False] + 4 * [True], 6 * [True]]
    assert run.stream.awaits()
    run.stream.lose([(0, Span(4, 8)), (1, Span(0, 6))])
    assert not run.stream.awaits()
    run.weights[1].zero_()
    run.stream.expect([1])
    run.stream.lose()
    assert run.lost() == [4 * [False] + 4 * [True], 6 * [True]]
    assert not run.stream.awaits()


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
        ([2] * 3, [[(0, Span(0, 2))], [(1, Span(0, 2)), (2, Span(0, 2))]]),
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
    monkeypatch.setattr(places, "CHUNK_NUMEL", CHUNK)
    process: Any = Process()
    stream, *_ = stream_of(plan_of(numels, "cpu", block_size=2), process)
    stream.expect(range(len(numels)))
    stream.depart([WorkerTask(i, 0, ANY) for i in range(len(numels))], {})
    assert process.sent == expected
    for number, message in enumerate(process.sent, 1):  # each chunk waits for its own message
        for part in message:
            stream.complete(None, [part])
            assert process.awaited.pop() == number


# -- how many chunks are peeked at -----------------------------------------------------------------

FORWARD, BACKWARD, PEEK, MANY = 0.25, 0.75, 16 / 28, 32
"""In steps, and a peek in passes."""


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_steps_wait_hardly_longer_than_with_the_best_number(seconds: float) -> None:
    def waits(peeked: int) -> tuple[float, float]:
        """For weights and for passes, if all passes take `seconds`."""
        first = seconds * (1.0 - (1.0 - PEEK) * peeked / MANY)
        for_weights = max(0.0, first - FORWARD)
        rest = seconds * (1.0 + PEEK * peeked / MANY)
        return for_weights, max(0.0, rest - FORWARD - BACKWARD - for_weights)

    order, seen, last = ChunkOrder([MANY], 1, 1), list[float](), (0.0, 0.0)
    assert order.peeked(MANY) == MANY
    for _ in range(60):
        order.follow(*last, 1.0 + sum(last))  # which are known one step late
        last = waits(order.peeked(MANY))
        seen.append(sum(last))
    best = min(sum(waits(number)) for number in range(MANY + 1))
    assert sum(seen[20:]) / 40 <= best + 0.03 * (1.0 + best)
