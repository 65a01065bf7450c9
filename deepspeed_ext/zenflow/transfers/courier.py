"""Carries gradients to the worker and its results back, in a thread beside the trainer's
computation.

An update travels in parcels, each a run of whole blocks of one partition. The trainer starts the
copies to the host and continues. The courier waits until a parcel has arrived in the arena, submits
its task to the worker, and starts the copy back once the worker has stepped it. It submits the next
parcel before it waits for the answer to this one, so the worker is never idle.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.worker.messages import Patience, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess, within_group_timeout

_PARCELS_AHEAD = 1
_CLOSE_SECONDS = 2.0
_LATER_SECONDS = 5.0
"""The trainer waits this much longer than the courier, so that the courier's more specific error
comes first."""


class Latch:
    """Opens once, for all who wait.

    Attributes:
        is_open: whether it has been opened.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Open it; idempotent, but only one thread may call this."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait_a_slice(self, patience: Patience) -> None:
        """Block for one slice of `patience` at most, or until it is open. A signal handler that
        interrupts this may call it as well."""
        if not self.is_open and self._lock.acquire(timeout=max(0.0, patience.begin_slice())):
            return  # the lock is no longer needed
        patience.end_slice()


@dataclass
class Parcel:
    """A chunk on a visit to the worker.

    Attributes:
        start_down: starts its copy to the host; returns events after which the worker may take it:
            its gradient has arrived, and nothing reads what the task will overwrite. None: nothing
            to wait for.
        task: the worker's task; None: `predict` gives the result.
        bring_up: called by the courier to start the copy of the result to its place; None: there is
            none.
        predict: computes the result in the courier's thread; None: `task` gives it.
        down: the events; None before `send`.
        here: opens once the worker has answered and the copy of the result has been started, or an
            error has ended the shipment.
    """

    start_down: Callable[[], Iterable[Any]]
    task: WorkerTask | None
    bring_up: Callable[[], None] | None = None
    predict: Callable[[], None] | None = None
    down: Iterable[Any] | None = None
    here: Latch = field(default_factory=Latch, init=False)

    def send(self) -> None:
        """Start its copy to the host, unless that is done."""
        if self.down is None:
            self.down = self.start_down()

    def wait(self) -> None:
        """Wait until the worker may take it."""
        for event in self.down or ():
            if event is not None:
                event.synchronize()


class Shipment:
    """Parcels sent together, in order.

    Args:
        parcels: the parcels, those without a task first; `at_once` may already have been sent.
        at_once: how many of them may be on the host at once, at least 2; None: all.

    Attributes:
        carried: parcels delivered so far.
        done: opens once everything is delivered or an error has ended it. The shipment then holds
            no more references.
    """

    def __init__(
        self, parcels: Sequence[Parcel], process: OptimizerProcess, at_once: int | None
    ) -> None:
        self.carried = 0
        self.done = Latch()
        self._parcels = list(parcels)
        self._at_once = len(parcels) if at_once is None else at_once
        self._process: OptimizerProcess | None = process
        assert at_once is None or at_once > _PARCELS_AHEAD, "a parcel waits behind the worker's"

    def carry(self) -> None:
        """Deliver all parcels. Called by the courier's thread."""
        process, parcels, numbers = self._process, self._parcels, deque[int]()
        assert process is not None
        for parcel in parcels[: self._at_once]:
            parcel.send()
        for parcel in parcels:
            parcel.wait()
            if parcel.predict is not None:
                parcel.predict()
                self._deliver()
            if parcel.task is not None:
                numbers.append(process.submit([parcel.task]))
            if len(numbers) > _PARCELS_AHEAD:
                process.wait_for(numbers.popleft())
                self._deliver()
        for number in numbers:
            process.wait_for(number)
            self._deliver()

    def _deliver(self) -> None:
        """The result of the oldest parcel is on the host: start its way up, and send the parcel
        that comes to its place."""
        parcel = self._parcels[self.carried]
        if parcel.bring_up is not None:
            parcel.bring_up()
        parcel.here.open()
        self.carried += 1
        for parcel in self._parcels[self.carried + self._at_once - 1 :][:1]:
            parcel.send()  # the place is free

    def finish(self) -> None:
        """Record that nothing is left to do."""
        for parcel in self._parcels:
            parcel.here.open()
        self._parcels, self._process = [], None
        self.done.open()


class Courier:
    """The thread and its shipments. The thread ends at `close`, or when this object is
    garbage-collected.

    Args:
        device: index of the accelerator on which the trainer's tensors are.
        timeout_seconds: longest time that `wait` waits without a parcel being delivered.
    """

    def __init__(self, device: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._shipments: deque[Shipment] = deque()
        self._errors: list[BaseException] = []
        # True: there is work; False: end
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_carry_all,
            args=(self._calls, self._shipments, self._errors, device),
            name="deepspeed_ext-courier",
            daemon=True,
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._calls, self._thread, os.getpid())

    @property
    def is_idle(self) -> bool:
        """Whether everything is delivered."""
        return all(shipment.done.is_open for shipment in tuple(self._shipments))

    def send(
        self, parcels: Sequence[Parcel], process: OptimizerProcess, at_once: int | None = None
    ) -> None:
        """Queue `parcels` after everything sent before, without waiting. `at_once` as for
        `Shipment`."""
        while self._shipments and self._shipments[0].done.is_open:
            self._shipments.popleft()
        self._shipments.append(Shipment(parcels, process, at_once))
        self._calls.put(True)

    def wait(self, within: Patience | None = None, parcel: Latch | None = None) -> None:
        """Wait until parcels are delivered: gradients are in the arena, the worker has the tasks,
        and copies back are started. May be called by a signal handler.

        Args:
            within: longest wait in all; None: unlimited while parcels are delivered.
            parcel: `Parcel.here` of the one that is waited for; None: all.

        Raises:
            Exception: the error that ended the courier's work.
            WorkerError: no parcel was delivered for `timeout_seconds`, or `within` has expired.
        """
        self._calls.put(True)  # the handler may have interrupted `send`
        for latch in [each.done for each in self._shipments] if parcel is None else [parcel]:
            self._wait_until(latch, within)
        if self._errors:
            raise self._errors[0]

    def _wait_until(self, latch: Latch, within: Patience | None) -> None:
        patience, seen = Patience(self._timeout_seconds + _LATER_SECONDS, within), self._carried
        while not latch.is_open:
            if (carried := self._carried) != seen:
                patience.renew()
                seen = carried
            if within is not None and within.is_over:
                raise WorkerError(
                    "copies between accelerator and optimizer process, and its passes, have not "
                    f"ended within {within.seconds:g} s. {within_group_timeout()}"
                )
            if patience.is_over or not self._thread.is_alive():
                raise WorkerError(
                    "copies between accelerator and optimizer process have made no progress for "
                    f"{self._timeout_seconds:g} s: the accelerator may be stuck. If it is only "
                    "slow, raise zenflow.worker_timeout_seconds"
                )
            latch.wait_a_slice(patience)

    @property
    def _carried(self) -> int:
        return sum(shipment.carried for shipment in tuple(self._shipments))

    def close(self) -> bool:
        """End the thread. Close the worker first, because the thread may be waiting for it.
        Idempotent.

        Returns:
            Whether the thread has ended; if not, it still waits for the accelerator.
        """
        self._finalizer()
        return not self._thread.is_alive()


def _carry_all(
    calls: queue.SimpleQueue[bool],
    shipments: deque[Shipment],
    errors: list[BaseException],
    device: int,
) -> None:
    """The thread's function. While idle it refers to no worker, so an unreferenced engine can be
    freed."""
    get_accelerator().set_device(device)
    while calls.get():
        for shipment in tuple(shipments):
            if shipment.done.is_open:
                continue
            try:
                if not errors:
                    shipment.carry()
            except BaseException as error:  # raised again by the trainer's next wait
                errors.append(error)
            finally:
                shipment.finish()


def _end(calls: queue.SimpleQueue[bool], thread: threading.Thread, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked process has no such thread
        return
    calls.put(False)
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):  # at the interpreter's end
            thread.join(_CLOSE_SECONDS)
