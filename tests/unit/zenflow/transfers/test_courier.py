"""The courier's thread: the order of its work, its errors, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.transfers import courier as courier_module
from deepspeed_ext.zenflow.transfers.courier import Courier, Parcel


class Recorded:
    """A worker, events and copies that note what is asked of them, and fail or block at one of
    these requests."""

    notes_sends = False

    def __init__(self, fails_at: str = "", blocks_at: str = "") -> None:
        self.asked: list[str] = []
        self.fails_at, self.blocks_at = fails_at, blocks_at
        self.may_go_on = threading.Event()
        self.newest = 0

    def note(self, request: str) -> None:
        self.asked.append(request)
        if request == self.blocks_at:
            assert self.may_go_on.wait(30)
        if request == self.fails_at:
            raise WorkerError(f"cannot {request}")

    def submit(self, tasks: Any) -> int:
        self.newest += 1
        self.note(f"tell {tasks[0]}")
        return self.newest

    def wait_for(self, number: int, timeout_seconds: float | None = None) -> None:
        self.note(f"await {number}")

    def parcels(self, count: int, *, up: bool = True) -> list[Parcel]:
        return [
            Parcel(
                partial(self.send, index),
                index,  # type: ignore[arg-type]
                self.bring_up(index) if up else None,
            )
            for index in range(1, count + 1)
        ]

    def send(self, index: int) -> tuple[Any, ...]:
        if self.notes_sends:
            self.note(f"send {index}")
        return None, Arrival(self, index)

    def bring_up(self, index: int) -> Callable[[], None]:
        return lambda: self.note(f"bring up {index}")


class Arrival:
    def __init__(self, recorded: Recorded, index: int) -> None:
        self.recorded, self.index = recorded, index

    def synchronize(self) -> None:
        self.recorded.note(f"arrive {self.index}")


def couriers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "deepspeed_ext-courier"}


def carried(recorded: Recorded, *shipments: list[Parcel], at_once: int | None = None) -> list[str]:
    courier = Courier(0, timeout_seconds=30.0)
    for parcels in shipments:
        courier.send(parcels, recorded, at_once)  # type: ignore[arg-type]
    try:
        courier.wait()
    finally:
        courier.close()
    return recorded.asked


def test_the_worker_has_the_next_parcel_before_this_one_is_awaited() -> None:
    recorded = Recorded()
    asked = carried(recorded, recorded.parcels(3))
    assert asked == [
        *("arrive 1", "tell 1", "arrive 2", "tell 2", "await 1", "bring up 1"),
        *("arrive 3", "tell 3", "await 2", "bring up 2", "await 3", "bring up 3"),
    ]


def test_what_stays_on_the_host_is_awaited_too() -> None:
    recorded = Recorded()
    asked = carried(recorded, recorded.parcels(1, up=False))
    assert asked == ["arrive 1", "tell 1", "await 1"]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    at_once=st.integers(2, 5),
    already=st.integers(0, 5),
)
def test_a_parcel_is_sent_once_the_one_before_in_its_place_is_brought_up(
    counts: list[int], at_once: int, already: int
) -> None:
    """Also if the trainer has sent the first ones; and none waits for a later one, which would be a
    deadlock."""
    for count in counts:
        recorded = Recorded()
        recorded.notes_sends = True
        parcels = recorded.parcels(count)
        for parcel in parcels[: min(already, at_once)]:
            parcel.send()
        asked = carried(recorded, parcels, at_once=at_once)
        when = {request: number for number, request in enumerate(asked)}
        assert len(when) == len(asked), "nothing twice"
        for index in range(1, count + 1):
            assert when[f"send {index}"] < when[f"arrive {index}"] < when[f"bring up {index}"]
            if index > at_once:
                assert when[f"bring up {index - at_once}"] < when[f"send {index}"]


def test_parcels_are_sent_as_early_as_there_is_a_place() -> None:
    recorded = Recorded()
    recorded.notes_sends = True
    asked = carried(recorded, recorded.parcels(4), at_once=3)
    assert asked[:4] == ["send 1", "send 2", "send 3", "arrive 1"]
    assert asked[asked.index("bring up 1") + 1] == "send 4"


EVERY_REQUEST = carried((first := Recorded()), first.parcels(3))


@pytest.mark.parametrize("request_", EVERY_REQUEST)
def test_an_error_anywhere_is_raised_by_every_later_wait_and_nothing_more_is_carried(
    request_: str,
) -> None:
    recorded = Recorded(fails_at=request_)
    courier = Courier(0, timeout_seconds=30.0)
    courier.send(recorded.parcels(3), recorded)  # type: ignore[arg-type]
    courier.send(recorded.parcels(1), recorded)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(WorkerError, match=f"cannot {request_}"):
            courier.wait()
    assert recorded.asked == EVERY_REQUEST[: EVERY_REQUEST.index(request_) + 1]
    courier.close()


@pytest.mark.parametrize("request_", EVERY_REQUEST)
def test_a_wait_ends_if_nothing_moves(request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "_LATER_SECONDS", 0.1)
    monkeypatch.setattr(courier_module, "_CLOSE_SECONDS", 0.01)
    recorded = Recorded(blocks_at=request_)
    courier = Courier(0, timeout_seconds=0.1)
    courier.send(recorded.parcels(3), recorded)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match=r"have made no progress for 0\.1 s"):
        courier.wait()
    courier.close()
    recorded.may_go_on.set()


def test_a_forgotten_courier_ends_its_thread_and_keeps_no_worker() -> None:
    before, recorded = couriers(), Recorded()
    courier = Courier(0, timeout_seconds=30.0)
    courier.send(recorded.parcels(2), recorded)  # type: ignore[arg-type]
    courier.wait()
    worker = weakref.ref(recorded)
    del recorded
    gc.collect()
    assert worker() is None
    (thread,) = couriers() - before
    del courier
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
