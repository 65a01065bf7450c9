"""The end of the optimizer process: trainer and worker notice each other's end, and no process is
left."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.worker import process as process_module
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.optimizer_process import PASS, gone, make_plan, running, step_for_ever
from tests.support.paths import ROOT
from tests.support.waiting import GENEROUS_SECONDS, wait_until


def test_close_is_idempotent_and_later_calls_raise() -> None:
    with running() as (_, process):
        process.close()
        process.close()
        assert gone(process.pid)
        with pytest.raises(WorkerError, match=r"rank 3.*closed"):
            process.submit([PASS])
        with pytest.raises(WorkerError, match="closed"):
            process.wait()


def test_the_process_ends_when_its_object_is_deleted() -> None:
    plan = make_plan()
    with running() as (_, process):
        pid = OptimizerProcess(Arena.create(plan.layout), plan, rank=0, timeout_seconds=60).pid
        assert gone(pid)
        process.submit([PASS])
        assert process.wait().number == 1


@pytest.mark.parametrize("stepping", [False, True], ids=["idle", "stepping"])
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, r"SIGKILL.*exit status -9.*checkpoint"),
        (signal.SIGBUS, r"SIGBUS.*lower host memory use"),  # no page is left for the arena
        (signal.SIGRTMIN + 1, rf"killed by signal {signal.SIGRTMIN + 1} "),
    ],
)
def test_a_killed_worker_is_an_error_at_once_that_says_how_it_ended(
    number: int, says: str, stepping: bool
) -> None:
    with running(numel=4_000_000, timeout_seconds=600.0) as (arena, process):
        if stepping:
            arena.tensor("g").fill_(1.0)
            process.submit([PASS] * 2000)
            wait_until(lambda: bool(arena.tensor("m")[-1]), "the end of the first pass")
        os.kill(process.pid, number)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank 3.*{says}"):
            step_for_ever(process)
        assert time.monotonic() - begin < GENEROUS_SECONDS


def test_the_worker_ignores_interrupts() -> None:
    """The worker is outside the terminal's process group, and ignores SIGINT if it gets one."""
    with running() as (_, process):
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        os.kill(process.pid, signal.SIGINT)
        process.submit([PASS])
        assert process.wait().number == 1


TRAINER = """
import os, sys
sys.path.insert(0, {root!r})
from tests.support.optimizer_process import PASS, running
from tests.support.waiting import wait_to_be_killed
with running(numel=4_000_000) as (arena, process):
    if {stepping}:
        process.submit([PASS] * 5000)
    child, test = 0, os.getppid()
    if {fork}:  # a DataLoader worker that outlives the trainer and holds a copy of its sockets
        child = os.fork()
        if child == 0:
            wait_to_be_killed(test)
            os._exit(0)
    print(process.pid, child, flush=True)
    wait_to_be_killed(test)
"""


@pytest.mark.parametrize(
    ("stepping", "fork"),
    [(False, True), (True, False), pytest.param(True, True, marks=pytest.mark.full)],
)
def test_killed_trainer_leaves_no_worker(stepping: bool, fork: bool) -> None:
    code = textwrap.dedent(TRAINER).format(root=str(ROOT), stepping=stepping, fork=fork)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker, child = map(int, trainer.stdout.readline().split())
    trainer.kill()
    trainer.wait()
    assert gone(worker)
    if fork:
        os.kill(child, signal.SIGKILL)


def test_an_inherited_socket_does_not_hide_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may fork during the launch; its child keeps a copy of the worker's socket
    open."""
    copies = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            copies.append(os.dup(kwargs["pass_fds"][0]))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(process_module.subprocess, "Popen", Popen)
    with running(timeout_seconds=600.0) as (_, process):
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="SIGKILL"):
            step_for_ever(process)
        assert time.monotonic() - begin < GENEROUS_SECONDS
    os.close(copies.pop())


def test_an_inherited_socket_does_not_prevent_close() -> None:
    with running() as (_, process):
        copy = os.dup(process._channel._end.fileno())
        process.close()
        assert process._process.returncode == 0
        os.close(copy)


def test_the_end_of_an_idle_worker_is_noticed() -> None:
    with running() as (_, process):
        os.kill(process.pid, signal.SIGKILL)
        assert gone(process.pid)
        assert process.wait().number == 0  # nothing was in flight: what is in the arena is complete
        for ask in (process.require_alive, process.wait, process.require_alive):
            with pytest.raises(WorkerError, match="SIGKILL"):
                ask()
