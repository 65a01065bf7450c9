"""If a worker dies, raises or hangs, every rank raises the same error within seconds, with rank and
remedy."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from deepspeed import comm as dist

from deepspeed_ext.adapter.step import StepDriver
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.kernel.adam_pass import Publish
from deepspeed_ext.zenflow.worker.messages import WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.models import batches
from tests.support.optimizer_process import gone
from tests.support.ranks import run_ranks
from tests.support.waiting import GENEROUS_SECONDS
from tests.support.zenflow import RULES, make_engine, small_chunks, train, zenflow_config

pytestmark = [pytest.mark.sampled(4), pytest.mark.usefixtures("started_workers")]

TIMEOUT_SECONDS = 2.0


def kill_at_launch() -> tuple[Any, list[float]]:
    """Let the next worker be killed as soon as it exists; returns what to restore and when it was
    killed."""
    launch, killed = OptimizerProcess._launch, []

    def launch_and_kill(self: OptimizerProcess, *args: Any) -> Any:
        process, connection = launch(self, *args)
        process.kill()
        killed.append(time.monotonic())
        return process, connection

    OptimizerProcess._launch = launch_and_kill  # type: ignore[method-assign, assignment]
    return launch, killed


def harm(process: OptimizerProcess, how: str) -> None:
    """Do to a worker that lives what `how` says."""
    if how == "stepping":  # it has work, and dies before it can answer
        os.kill(process.pid, signal.SIGSTOP)
        process.submit([WorkerTask(0, 0, Publish.exact(1.0, 1e-8))])
    if how == "raising":
        # a fast worker has answered before this returns; then the next wait says it again
        with suppress(WorkerError):
            process.submit([WorkerTask(0, 7, Publish.exact(1.0, 1e-8))])
    elif how == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
    else:
        os.kill(process.pid, signal.SIGKILL)
        assert gone(process.pid)


def suffer(config: dict, how: str, folder: str) -> dict[str, Any]:
    """Train on two ranks while rank 0's worker comes to harm; how does this rank end, and can it
    begin anew?"""
    rank, harmed, engine, message = dist.get_rank(), 0.0, None, "no error"
    launch = OptimizerProcess._launch
    try:
        if how == "starting" and rank == 0:
            launch, killed = kill_at_launch()
        engine = make_engine(config)
        train(engine, batches(4, rank))
        process = engine.optimizer.host_optimizer.link.process
        engine.optimizer.host_optimizer.state.drain()
        dist.barrier()
        harmed = time.monotonic()
        if rank == 0:
            harm(process, how)
        dist.barrier()
        if how == "saving":
            engine.save_checkpoint(folder)
        else:
            train(engine, batches(20, rank))
    except WorkerError as error:
        message = str(error)
    ended = time.monotonic()
    OptimizerProcess._launch = launch  # type: ignore[method-assign]
    if how == "starting" and rank == 0:
        (harmed,) = killed
    left = [p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    if engine is not None:
        engine.destroy()
    again = make_engine(config)
    losses = train(again, batches(3, rank))
    again.destroy()
    return {"message": message, "harmed": harmed, "ended": ended, "left": left, "losses": losses}


@pytest.mark.parametrize(
    ("stage", "rule", "how"),
    [
        (2, "predictive", "idle"),
        (3, "predictive", "stepping"),
        (2, "selective", "stepping"),
        (2, "predictive", "starting"),
        (2, "predictive", "raising"),
        (2, "predictive", "stopped"),
        (2, "selective", "saving"),
    ],
)
def test_every_rank_ends_with_the_error_and_can_begin_anew(
    stage: int, rule: str, how: str, tmp_path: Path
) -> None:
    timeout = TIMEOUT_SECONDS if how == "stopped" else 600.0
    config = zenflow_config(stage, **RULES[rule], worker_timeout_seconds=timeout)
    outcomes = run_ranks(2, suffer, config, how, str(tmp_path))
    says = {"raising": "slot=7", "stopped": "did not answer within 2 s"}.get(how, "SIGKILL")
    for outcome in outcomes:
        assert "rank 0" in outcome["message"]
        assert says in outcome["message"]
        assert "checkpoint" in outcome["message"]
        assert outcome["ended"] - outcomes[0]["harmed"] < GENEROUS_SECONDS
        assert outcome["left"] == []
        assert all(math.isfinite(loss) for loss in outcome["losses"])
    assert not list(tmp_path.iterdir())


PHASES: dict[str, tuple[type, str]] = {
    "gradients leave": (HostOptimizer, "step_partition"),
    "the norm is known": (StepDriver, "find_factor"),
    "the worker steps": (WorkerLink, "depart"),
    "the step has ended": (HostOptimizer, "end_step"),
    "chunks arrive": (Stream, "_receive"),
    "a backward pass completes weights": (HostOptimizer, "complete_weights"),
    "a save": (StateStore, "drain"),
}
"""Phases of a step of the exact rule, and the method behind whose first call the worker is
killed."""


def shared_mappings() -> set[str]:
    """What this process maps in /dev/shm."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


def lose_in(config: dict[str, Any], phase: str, folder: str) -> dict[str, Any]:
    """Rank 0's worker dies in a phase of an exact step. How does this rank end, and how does a
    resume differ from an undisturbed run?"""
    rank = dist.get_rank()
    data, message, before = batches(6, rank), "no error", shared_mappings()
    with small_chunks():
        engine = make_engine(config)
        train(engine, data[:2])
        engine.save_checkpoint(folder, tag="good")
        straight = train(engine, data[2:])
        engine.destroy()
        engine = make_engine(config)
        engine.load_checkpoint(folder, tag="good")
        train(engine, data[2:3])
        process = engine.optimizer.host_optimizer.link.process
        owner, name = PHASES[phase]
        method, killed = getattr(owner, name), list[bool]()

        def and_killed(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            if rank == 0 and not killed:
                os.kill(process.pid, signal.SIGKILL)
                killed.append(gone(process.pid))
            return found

        try:
            with patch.object(owner, name, and_killed):
                if phase == "a save":
                    engine.save_checkpoint(folder, tag="lost")
                train(engine, data[3:])
        except WorkerError as error:
            message = str(error)
        engine.destroy()
        again = make_engine(config)
        again.load_checkpoint(folder, tag="good")
        resumed = train(again, data[2:])
        again.destroy()
    children = psutil.Process().children()
    left = [f"process {p.pid}" for p in children if p.status() != psutil.STATUS_ZOMBIE]
    left += sorted(shared_mappings() - before)
    return {"message": message, "left": left, "same": resumed == straight}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("stage", "device"), [(2, "sim"), (3, "cpu"), (3, "sim")])
def test_a_worker_dies_in_any_phase_of_an_exact_step(
    stage: int, device: str, phase: str, tmp_path: Path
) -> None:
    """On a device the worker peeks, and its passes follow."""
    config = zenflow_config(stage, update_rule="exact")
    for found in run_ranks(2, lose_in, config, phase, str(tmp_path), device=device):
        assert "rank 0" in found["message"]
        assert "SIGKILL" in found["message"]
        assert "checkpoint" in found["message"]
        assert found["left"] == []
        assert found["same"]


def train_and_destroy(config: dict) -> list[bool]:
    """Two engines at once, then none: are their workers gone?"""
    engines = [make_engine(config), make_engine(config)]
    pids = [engine.optimizer.host_optimizer.link.process.pid for engine in engines]
    for engine in engines:
        train(engine, batches(2, 0))
    for engine in engines:
        engine.destroy()
        engine.destroy()
    return [psutil.pid_exists(pid) for pid in pids]


@pytest.mark.parametrize("stage", [2, 3])
def test_destroy_ends_the_workers(stage: int) -> None:
    assert run_ranks(1, train_and_destroy, zenflow_config(stage)) == [[False, False]]


def losses_until_the_error(config: dict, killed_after: int) -> tuple[list[float], list[float]]:
    """Losses with a worker of rank 0 that dies after some steps, up to the error, and those of a
    run without."""
    rank, found = dist.get_rank(), []
    data = batches(20, rank)
    engine = make_engine(config)
    undisturbed = train(engine, data)
    engine.destroy()
    engine = make_engine(config)
    try:
        for number, batch in enumerate(data):
            if number == killed_after and rank == 0:
                harm(engine.optimizer.host_optimizer.link.process, "idle")
            found += train(engine, [batch])
    except WorkerError:
        pass
    engine.destroy()
    return found, undisturbed


@pytest.mark.parametrize("killed_after", [9, 10, 11, 12])
def test_no_loss_before_the_error_is_wrong(killed_after: int) -> None:
    config = zenflow_config(2, full_warm_up_rounds=4)
    for losses, undisturbed in run_ranks(2, losses_until_the_error, config, killed_after):
        assert killed_after <= len(losses) < len(undisturbed)
        assert losses == undisturbed[: len(losses)]
