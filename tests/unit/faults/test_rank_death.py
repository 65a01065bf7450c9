"""A rank that dies in any phase of a step or a save, or between two, ends the others with one
error. No process and no shared memory outlives its rank, and the last complete checkpoint loads."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
import pytest
from deepspeed import comm as dist

from deepspeed_ext.adapter import joint_checkpoint_engine
from deepspeed_ext.adapter.gather_hooks import LateWeights
from deepspeed_ext.adapter.gradients import HostGradients
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.reached_state import ReachedState
from deepspeed_ext.adapter.step import StepDriver
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.zenflow.plan.times import MEASURED_STEPS
from deepspeed_ext.zenflow.step.first_steps import FirstSteps
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.transfers.stream import Stream
from tests.support.models import batches
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.same import first_difference
from tests.support.waiting import GENEROUS_SECONDS, wait_until
from tests.support.zenflow import make_engine, small_chunks, train, zenflow_config

GROUP_TIMEOUT_SECONDS = 20.0
FAILED = 3
GOOD, MORE = 2, 4
"""Steps before the checkpoint that must load, and steps after it."""
PEER_IS_GONE = re.compile("closed by peer|reset by peer", re.IGNORECASE)
"""What gloo says of a rank that has ended."""
IS_NOT_SAVED = re.compile("checkpoint 'lost' was not saved: not all ranks came .* ended before, .*")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "predictive": {"update_rule": "predictive"},
    "exact": {"update_rule": "exact"},
    "share": {"full_warm_up_rounds": MEASURED_STEPS + 1, "autotune": True},
}
"""Fields of the ``zenflow`` section."""
NAMED = ("exact", "predictive")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlives SIGKILL")


@dataclass(frozen=True)
class Phase:
    """Where a rank dies: in a call of a method after the checkpoint.

    Attributes:
        owner, method: whose call it is; None: the hook of a parameter's gradient.
        is_behind: whether the rank dies as the call returns; otherwise in front of it.
        ways, stages, devices: with which it is tried.
        saves: whether the run saves a second checkpoint first: "waiting", or "beside" training.
        when: whether it is this call, from the method's object.
    """

    owner: type | None
    method: str = ""
    is_behind: bool = False
    ways: tuple[str, ...] = NAMED
    stages: tuple[int, ...] = (1, 2, 3)
    devices: tuple[str, ...] = ("cpu",)
    saves: str = ""
    when: Callable[[Any], bool] = lambda _: True

    @contextmanager
    def deadly(self, engine: Any) -> Iterator[None]:
        """This rank dies inside."""
        if self.owner is None:
            parameters = list(engine.module.parameters())
            parameters[len(parameters) // 2].register_hook(lambda _: die())
            yield
            return
        method = getattr(self.owner, self.method)

        @functools.wraps(method)
        def dying(owner: Any, *args: Any, **kwargs: Any) -> Any:
            is_it = self.when(owner)
            if is_it and not self.is_behind:
                die()
            found = method(owner, *args, **kwargs)
            return die() if is_it else found

        with patch.object(self.owner, self.method, dying):
            yield


BOTH, SIM = ("cpu", "sim"), ("sim",)
PHASES = {
    "backward": Phase(None),
    "gradients leave": Phase(HostGradients, "take", True, ("exact",), (2, 3), SIM),
    "the norm is known": Phase(StepDriver, "find_factor", True),
    "gradients are handed over": Phase(HostOptimizer, "step_partition", True),
    "the worker steps": Phase(WorkerLink, "depart", True, devices=BOTH),
    "a chunk of several has arrived": Phase(Stream, "_receive", True, ("exact",), (3,), BOTH),
    "a gather of stage 3 waits": Phase(
        LateWeights,
        "complete",
        False,
        ("exact",),
        (3,),
        BOTH,
        when=lambda late: late._host.link.stream.awaits(),
    ),
    "backward completes weights": Phase(ReachedState, "complete_weights", False, ("exact",)),
    "a save waits for the worker": Phase(StateStore, "drain", saves="waiting"),
    "a save writes": Phase(JointCheckpointEngine, "_write", saves="waiting"),
    "a save is named": Phase(JointCheckpointEngine, "_complete", saves="waiting"),
    "a save beside training begins": Phase(JointCheckpointEngine, "_write", saves="beside"),
    "a save beside training goes on": Phase(JointCheckpointEngine, "commit", True, saves="beside"),
    "a step goes on beside a save": Phase(HostOptimizer, "step_partition", saves="beside"),
    "a save beside training is named": Phase(JointCheckpointEngine, "_complete", saves="beside"),
    "a share is agreed on": Phase(FirstSteps, "_choose", False, ("share",), devices=SIM),
    "between steps": Phase(HostOptimizer, "end_step", True, ("default",), (2,)),
}


def config_of(phase: Phase, way: str, stage: int) -> dict[str, Any]:
    section = dict(WAYS[way])
    if phase.owner is HostGradients:
        section["gradients_on_host"] = True
    config = zenflow_config(stage, async_save=phase.saves == "beside", **section)
    if way != "share":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 1.0}
    return config


def data_of(config: dict[str, Any]) -> Any:
    is_measured = "full_warm_up_rounds" in config["zero_optimization"]["zenflow"]
    return batches(GOOD + MORE + 2 * MEASURED_STEPS * is_measured, dist.get_rank())


def dies_in(config: dict[str, Any], name: str, victim: int, folder: str) -> None:
    """Train, save, and go on until rank `victim` dies; the others tell their errors."""
    rank, data, phase = dist.get_rank(), data_of(config), PHASES[name]
    joint_checkpoint_engine.LONGEST_MEETING_SECONDS = 1.0
    with small_chunks(), ExitStack() as stack:
        engine = make_engine(config)
        train(engine, data[:GOOD])
        engine.save_checkpoint(folder, tag="good")
        files = engine.checkpoint_engine
        if phase.saves == "beside":
            files.finish()
        worker = engine.optimizer.host_optimizer.link.process.pid
        Path(folder, f"pids{rank}").write_text(f"{os.getpid()} {worker}")
        dist.barrier()
        if rank == victim:
            stack.enter_context(phase.deadly(engine))
        try:
            if phase.saves:
                engine.save_checkpoint(folder, tag="lost")
            train(engine, data[GOOD:])
            if phase.saves == "beside":
                files.finish()
        except Exception as error:
            told = [str(error)]
            try:
                engine.destroy()
            except (CheckpointError, RuntimeError) as failure:
                told.append(str(failure))
            Path(folder, f"told{rank}").write_text(json.dumps(told))
            # as a script does: a rank that lived on would
            # keep its connections, and the others would wait
            os._exit(FAILED)


_undisturbed: dict[str, list[float]] = {}


def goes_on(config: dict[str, Any], folder: str) -> str:
    """How a resume from the last complete checkpoint differs from an undisturbed run."""
    data, name = data_of(config), json.dumps(config, sort_keys=True)
    with small_chunks():
        if name not in _undisturbed:
            engine = make_engine(config)
            _undisturbed[name] = train(engine, data)[GOOD:]
            engine.destroy()
        engine = make_engine(config)
        engine.load_checkpoint(folder)
        losses = train(engine, data[GOOD:])
        engine.destroy()
    return first_difference(_undisturbed[name], losses, "losses")


CASES: list[Any] = [
    (name, way, stage, 2, device)
    for name, phase in PHASES.items()
    for way in phase.ways
    for stage in phase.stages
    for device in phase.devices
]
CASES += [
    pytest.param("between steps", "default", stage, ranks, "accelerator", marks=pytest.mark.gpu)
    for ranks, stage in ((2, 3), (3, 2))
]


@pytest.mark.sampled(110)
@pytest.mark.parametrize(("name", "way", "stage", "ranks", "device"), CASES)
def test_the_others_end_with_one_error_and_leave_nothing(
    name: str, way: str, stage: int, ranks: int, device: str, tmp_path: Path
) -> None:
    phase, before = PHASES[name], set(os.listdir("/dev/shm"))
    config = config_of(phase, way, stage)
    victim = 0 if stage == 2 else ranks - 1
    outcomes = run_fresh_ranks(
        ranks,
        dies_in,
        config,
        name,
        victim,
        str(tmp_path),
        device=device,
        group_timeout_seconds=GROUP_TIMEOUT_SECONDS,
        grace_seconds=GENEROUS_SECONDS,
    )
    assert outcomes[victim].exit_code == -signal.SIGKILL, outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error is None, f"{outcome.error}\n{outcome.log}"
        if device == "accelerator" and outcome.exit_code == -signal.SIGABRT:
            continue  # by NCCL's watchdog
        assert outcome.exit_code == FAILED
        error, *of_destroy = json.loads((tmp_path / f"told{rank}").read_text())
        assert PEER_IS_GONE.search(error) or device == "accelerator", error
        if device == "cpu":  # elsewhere DeepSpeed then waits for all work, of which more has failed
            assert all(map(IS_NOT_SAVED.fullmatch, of_destroy)), of_destroy
            assert len(of_destroy) <= (phase.saves == "beside")
    pids = [int(word) for file in tmp_path.glob("pids*") for word in file.read_text().split()]
    assert len(pids) == 2 * ranks
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")
    wait_until(lambda: before.issuperset(os.listdir("/dev/shm")), "the end of shared memory")
    pool = f"exact {stage == 3}"
    assert (
        run_ranks(ranks, goes_on, config, str(tmp_path), device=device, pool=pool) == [""] * ranks
    )
