"""Faults while gradients and results travel beside a step, on the simulated accelerator: no rank
hangs, all have one error. And where there is no memory for it, they travel inside of the step."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import DeepSpeedExtError, WorkerError
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.transfers.courier import Parcel
from deepspeed_ext.zenflow.transfers.landing import LandingBuffer
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.kernel.adam_pass import Publish
from deepspeed_ext.zenflow.worker.messages import WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.models import batches, on_device
from tests.support.optimizer_process import gone
from tests.support.ranks import run_ranks
from tests.support.waiting import GENEROUS_SECONDS
from tests.support.zenflow import RULES, make_engine, run, small_chunks, train, zenflow_config

pytestmark = pytest.mark.sampled(8)

TIMEOUT_SECONDS = 2.0
WITHOUT_FAULT, UNTIL_ERROR = 3, 12
SLOT_THAT_IS_NOT = 7

STATES: dict[str, tuple[type, str, bool]] = {
    "going down": (WorkerLink, "depart", True),
    "arrived": (OptimizerProcess, "submit", False),
    "with the worker": (OptimizerProcess, "submit", True),
    "stepped": (OptimizerProcess, "wait_for", True),
    "coming up": (Stream, "_bring_up", True),
}
"""State of a chunk -> the method at whose end (True) or beginning it is in that state."""

PASSING = {**STATES, "being sent": (Parcel, "send", False), "sent": (Parcel, "send", True)}
"""The same where chunks pass through a few places, so that all but the first are sent by the
courier."""

WAYS = {**RULES, "in chunks": {}}


@contextmanager
def at(state: str, chunk: int, fault: Callable[[], None]) -> Iterator[None]:
    """Let `fault` happen once, when chunk number `chunk` from now on is in `state`."""
    owner, name, is_after = PASSING[state]
    original, left = getattr(owner, name), [1 if state == "going down" else chunk]

    def method(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not is_after:
            fault()
        result = original(*args, **kwargs)
        if left[0] == 0 and is_after:
            fault()
        return result

    with patch.object(owner, name, method):
        yield


@contextmanager
def a_task_that_raises(chunk: int) -> Iterator[None]:
    original, left = OptimizerProcess.submit, [chunk]

    def submit(self: OptimizerProcess, tasks: Any) -> int:
        left[0] -= 1
        bad = WorkerTask(0, SLOT_THAT_IS_NOT, Publish.exact(1.0, 1e-8))
        return original(self, [bad] if left[0] == 0 else tasks)

    with patch.object(OptimizerProcess, "submit", submit):
        yield


def fault_of(how: str, state: str, chunk: int, process: OptimizerProcess) -> AbstractContextManager:
    def kill() -> None:
        os.kill(process.pid, signal.SIGKILL)
        assert gone(process.pid)

    if how == "raising":
        return a_task_that_raises(chunk)
    return at(
        state, chunk, kill if how == "killed" else lambda: os.kill(process.pid, signal.SIGSTOP)
    )


def suffer(config: dict, how: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """For each state and number of a chunk: rank 0's worker comes to harm; how do the ranks end?"""
    found, rank = [], dist.get_rank()
    for state, chunk in cases:
        message, ended = "no error", 0.0
        with small_chunks():
            engine = make_engine(config)
            link = engine.optimizer.host_optimizer.link
            assert engine.optimizer.host_optimizer.decided.is_in_transit
            data = [on_device(batch) for batch in batches(WITHOUT_FAULT + UNTIL_ERROR, rank)]
            train(engine, data[:WITHOUT_FAULT])
            dist.barrier()
            begin = time.monotonic()
            with fault_of(how, state, chunk, link.process) if rank == 0 else nullcontext():
                try:
                    train(engine, data[WITHOUT_FAULT:])
                except WorkerError as error:
                    message, ended = str(error), time.monotonic() - begin
            engine.destroy()
        couriers = sum(thread.name == "deepspeed_ext-courier" for thread in threading.enumerate())
        found.append({"message": message, "seconds": ended, "couriers": couriers})
    return [*found, {"losses": run(config, 2, rank=rank).losses}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stage", "rule", "how", "cases"),
    [
        (2, "predictive", "killed", [(state, 2) for state in STATES]),
        (3, "selective", "killed", [("going down", 1), ("arrived", 1), ("coming up", 3)]),
        *(
            pytest.param(
                stage,
                rule,
                "killed",
                [(state, chunk) for state in STATES for chunk in (1, 3)],
                marks=pytest.mark.full,
            )
            for stage in (2, 3)
            for rule in RULES
        ),
        pytest.param(
            *(2, "in chunks", "killed", [(state, chunk) for state in PASSING for chunk in (2, 7)]),
            marks=pytest.mark.full,
        ),
        (3, "in chunks", "stopped", [("with the worker", 7)]),
        pytest.param(
            *(3, "in chunks", "stopped", [("stepped", 7), ("being sent", 7)]),
            marks=pytest.mark.full,
        ),
        (3, "in chunks", "raising", [("with the worker", chunk) for chunk in (1, 7)]),
        (3, "predictive", "stopped", [("going down", 1), ("with the worker", 2), ("stepped", 2)]),
        (2, "predictive", "raising", [("with the worker", chunk) for chunk in (1, 2, 3)]),
    ],
)
def test_a_worker_harmed_while_a_chunk_is_in_each_state(
    stage: int, rule: str, how: str, cases: list[tuple[str, int]]
) -> None:
    timeout = TIMEOUT_SECONDS if how == "stopped" else 600.0
    config = zenflow_config(
        stage, **WAYS[rule], hide_transfers=True, worker_timeout_seconds=timeout
    )
    says = {"raising": f"slot={SLOT_THAT_IS_NOT}", "stopped": "within 2 s"}.get(how, "SIGKILL")
    pool = f"simulated, stage {stage}"
    for *outcomes, after in run_ranks(2, suffer, config, how, cases, device="sim", pool=pool):
        assert all(math.isfinite(loss) for loss in after["losses"])
        for case, outcome in zip(cases, outcomes, strict=True):
            assert "rank 0" in outcome["message"], case
            assert says in outcome["message"], case
            assert outcome["seconds"] < GENEROUS_SECONDS, case
            assert outcome["couriers"] == 0, case


def refuse(*args: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory")


def refuse_the_copy(*args: Any) -> None:
    raise RuntimeError("an error of the link")


def start(config: dict, lacks: str, on_rank: int) -> tuple[str, list[float]]:
    """One rank lacks memory for the landing buffers: how copies run, and the losses."""
    lacking: dict[str, AbstractContextManager] = {
        "nothing": nullcontext(),
        "free memory": patch.object(allocation, "free_accelerator_bytes", lambda: 1000),
        "an allocation": patch.object(LandingBuffer, "__init__", refuse),
    }
    rank = dist.get_rank()
    with lacking[lacks] if rank == on_rank else nullcontext():
        engine = make_engine(config)
    kind = engine.optimizer.host_optimizer.decided.copies.name
    losses = train(engine, [on_device(batch) for batch in batches(6, rank)])
    engine.destroy()
    return kind, losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("lacks", "expected"),
    [("nothing", "BESIDE_STEP"), ("free memory", "WEIGHTS"), ("an allocation", "INSIDE_STEP")],
)
def test_without_memory_on_one_rank_copies_run_at_another_time_on_all(
    lacks: str, expected: str
) -> None:
    """Without free memory gradients wait on the host."""
    config = zenflow_config(2)
    found = run_ranks(2, start, config, lacks, 1, device="sim", pool="simulated, stage 2")
    plain = run_ranks(2, start, config, "nothing", 1, device="sim", pool="simulated, stage 2")
    for (kind, losses), (_, of_plain) in zip(found, plain, strict=True):
        assert (kind, losses) == (expected, of_plain)


def train_with_an_error_of_the_courier(config: dict) -> str:
    engine = make_engine(config)
    data = [on_device(batch) for batch in batches(8, dist.get_rank())]
    train(engine, data[:3])
    message = "no error"
    with (
        patch.object(Stream, "_bring_up", refuse_the_copy)
        if dist.get_rank() == 1
        else nullcontext()
    ):
        try:
            train(engine, data[3:])
        except DeepSpeedExtError as error:
            message = str(error)
    engine.destroy()
    return message


def test_an_error_of_the_courier_is_raised_on_every_rank() -> None:
    config = zenflow_config(2, hide_transfers=True)
    for message in run_ranks(
        2, train_with_an_error_of_the_courier, config, device="sim", pool="simulated, stage 2"
    ):
        assert "rank 1" in message
        assert "an error of the link" in message
