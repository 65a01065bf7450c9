"""Gives the optimizer process and the courier's thread their place in the model of time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.transfers.courier import Courier, Latch, Parcel, Shipment
from deepspeed_ext.zenflow.worker.messages import Span, Work, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.simulated_accelerator.device import library

__all__ = ["PEEK_OF_PASS", "PREDICTION_OF_PASS", "worker_time"]

PEEK_OF_PASS = 16 / 28
PREDICTION_OF_PASS = 6 / 28
"""Bytes that a peek, and the prediction of weights, move over those of a pass, with fp32
moments."""


@contextmanager
def worker_time(ns_per_element: float) -> Iterator[None]:
    """Give the optimizer process a lane in the model of time: each pass takes so long, one after
    the other."""
    model = _WorkerTime(ns_per_element / 1e3)
    with ExitStack() as stack:
        for owner, name in (
            (WorkerLink, "depart"),
            (OptimizerProcess, "submit"),
            (OptimizerProcess, "wait_for"),
            (OptimizerProcess, "wait"),
            (Shipment, "__init__"),
            (Shipment, "carry"),
            (Courier, "wait"),
            (Parcel, "wait"),
            (Latch, "open"),
        ):
            stack.enter_context(
                patch.object(owner, name, model.taught(owner, name)(getattr(owner, name)))
            )
        yield


class _WorkerTime:
    """Takes methods of the package and returns ones that also advance the clocks of the threads
    that call them."""

    def __init__(self, us_per_element: float) -> None:
        self._us_per_element = us_per_element
        self._numels: dict[int, int] = {}  # by partition
        self._ends_us: dict[int, float] = {0: 0.0}  # by submission
        self._sent_us: weakref.WeakKeyDictionary[Shipment, float] = weakref.WeakKeyDictionary()
        self._carried_us = 0.0
        self._opened_us: weakref.WeakKeyDictionary[Latch, float] = weakref.WeakKeyDictionary()

    def taught(self, owner: type, name: str) -> Callable[[Any], Any]:
        """What makes another method of a class's `name`."""
        name = "predict" if owner is Parcel else name
        return getattr(self, name.strip("_"))

    def depart(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(link: WorkerLink, tasks: Sequence[WorkerTask], **kwargs: Any) -> None:
            for task in tasks:
                self._numels[task.partition] = link.arena.array("p", task.partition).numel
            original(link, tasks, **kwargs)

        return method

    def submit(self, original: Callable[..., int]) -> Callable[..., int]:
        def method(process: OptimizerProcess, tasks: Sequence[Work]) -> int:
            number = original(process, tasks)
            passes = [task for task in tasks if isinstance(task, WorkerTask)]
            spans = [task.span or Span(0, self._numels[task.partition]) for task in passes]
            parts = [PEEK_OF_PASS if task.peeks else 1.0 for task in passes]
            numel = sum(span.numel * part for span, part in zip(spans, parts, strict=True))
            us = numel * self._us_per_element
            begin = max(library.now_us(), *self._ends_us.values())
            self._ends_us[number] = library.spend("worker", "pass", begin, us)
            return number

        return method

    def wait_for(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(process: OptimizerProcess, number: int, **kwargs: Any) -> None:
            original(process, number, **kwargs)
            library.host_waits_until(self._ends_us.get(number, 0.0), "the optimizer process")

        return method

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(waited_for: OptimizerProcess | Courier, *args: Any, **kwargs: Any) -> Any:
            found = original(waited_for, *args, **kwargs)
            ends = list(self._ends_us.values())
            if isinstance(waited_for, Courier):
                parcel = args[1] if len(args) > 1 else None
                ends = [self._carried_us if parcel is None else self._opened_us.get(parcel, 0.0)]
            library.host_waits_until(max(ends), type(waited_for).__name__)
            return found

        return method

    def open(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(latch: Latch) -> None:
            self._opened_us.setdefault(latch, library.now_us())
            original(latch)

        return method

    def predict(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(parcel: Any) -> None:
            original(parcel)
            if parcel.predict is not None:
                us = parcel.predict.args[0].numel * self._us_per_element * PREDICTION_OF_PASS
                end = library.spend("worker", "prediction", library.now_us(), us)
                library.host_waits_until(end, "the prediction")

        return method

    def init(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(shipment: Shipment, *args: Any) -> None:
            original(shipment, *args)
            self._sent_us[shipment] = library.now_us()

        return method

    def carry(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(shipment: Shipment) -> None:
            library.host_waits_until(self._sent_us.get(shipment, 0.0), "orders")
            original(shipment)
            self._carried_us = library.now_us()

        return method
