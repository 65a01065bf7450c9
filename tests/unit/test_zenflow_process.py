"""The optimizer process: a life with a start and an end, and no hang and no orphan whatever happens in between."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.affinity.worker import WorkerPlace
from deepspeed_ext.zenflow.arena import Arena, plan_layout
from deepspeed_ext.zenflow.kernel import AdamStep, Publish, library_path
from deepspeed_ext.zenflow.messages import PartitionPass, WorkerPlan, partition_specs
from deepspeed_ext.zenflow.process import OptimizerProcess

ROOT = Path(__file__).resolve().parents[2]
NUMEL = 10_000
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1, 1.0)
PASS = PartitionPass(0, (0,), (STEP,), Publish.exact(STEP.bias_correction2_sqrt, STEP.eps))


def make_plan(numel: int = NUMEL, **changes) -> WorkerPlan:
    how = {"block_size": 32, "publish_dtype": "bfloat16", "grad_dtype": "bfloat16", "ring": 1}
    layout = plan_layout(partition_specs(0, numel, per_block=("block_means", "float32"), **how))
    names = tuple(place.spec.name for place in layout.places)
    return replace(WorkerPlan(layout, 32, names, None, 1, library_path()), **changes)


@contextmanager
def running(numel: int = NUMEL, timeout_seconds: float = 60.0, **changes) -> Iterator[tuple[Arena, OptimizerProcess]]:
    plan = make_plan(numel, **changes)
    arena = Arena.create(plan.layout)
    with OptimizerProcess(arena, plan, rank=3, timeout_seconds=timeout_seconds) as process:
        yield arena, process
    arena.close()


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def step_for_ever(process: OptimizerProcess) -> None:
    while True:
        process.submit([PASS])
        process.wait()


@pytest.mark.parametrize("library", [library_path(), None])
def test_steps_are_carried_out_in_shared_memory(library: str | None) -> None:
    with running(library=library) as (arena, process):
        assert process.ready.kernel == ("reference" if library is None else "native")
        parameter = torch.randn(NUMEL).requires_grad_()
        arena.tensor("p.0").copy_(parameter.detach())
        parameter.grad = torch.randn(NUMEL).bfloat16().float()
        arena.tensor("g.0.0").copy_(parameter.grad)
        process.submit([PASS])
        done = process.wait()
        assert (done.number, done.seconds > 0, process.busy, process.poll()) == (1, True, False, True)
        torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1).step()
        torch.testing.assert_close(arena.tensor("p.0"), parameter.detach(), rtol=2e-6, atol=1e-8)
        assert torch.equal(arena.tensor("y.0"), arena.tensor("p.0").bfloat16())


def test_submissions_are_done_in_order_and_waited_for_together() -> None:
    with running() as (arena, process):
        arena.tensor("g.0.0").fill_(1.0)
        for _ in range(3):
            process.submit([PASS])
        assert process.busy
        assert process.wait().number == 3
        assert torch.allclose(arena.tensor("m.0"), torch.tensor(1 - 0.9**3))


def test_worker_is_bound_before_it_computes_and_imports_no_torch() -> None:
    cpu = min(os.sched_getaffinity(0))
    with running(place=str(WorkerPlace(frozenset({cpu})))) as (_, process):
        assert process.ready.cpus == (cpu,)
        assert psutil.Process(process.pid).cpu_affinity() == [cpu]
        if process.ready.kernel == "native":
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" not in maps


@pytest.mark.skipif(library_path() is None, reason="no native kernel and no C++ compiler here")
def test_worker_takes_no_memory_of_its_own_for_a_parameter() -> None:
    """At most 16.5 bytes a parameter in all: what the arena has is 16.125 (see test_zenflow_arena.py)."""
    own = []
    for numel in (100_000, 8_100_000):
        with running(numel=numel) as (arena, process):
            process.submit([PASS])
            process.wait()
            memory = psutil.Process(process.pid).memory_info()
            own.append(memory.rss - memory.shared)  # without the arena and libraries
            assert arena.resident_bytes() < numel * 16.125 + 10 * 4096
    assert own[1] - own[0] < 0.375 * 8_000_000
    assert own[1] < 64 * 2**20


def test_close_is_idempotent_and_later_calls_say_so() -> None:
    with running() as (_, process):
        process.close()
        process.close()
        assert gone(process.pid, 1.0)
        with pytest.raises(WorkerError, match=r"rank 3.*closed"):
            process.submit([PASS])
        with pytest.raises(WorkerError, match="closed"):
            process.wait()


def test_a_forgotten_process_ends() -> None:
    with running() as (arena, process):
        pid = OptimizerProcess(arena, make_plan(), rank=0, timeout_seconds=60).pid
        assert gone(pid, 3.0)
        assert not gone(process.pid, 0.1)


def test_exceptions_of_the_worker_come_back() -> None:
    with running() as (_, process):
        process.submit([replace(PASS, places=(7,))])
        with pytest.raises(WorkerError, match=r"(?s)rank 3.*pid.*KeyError: 'g.0.7'.*checkpoint"):
            process.wait()
        assert gone(process.pid, 1.0)


def test_exceptions_while_starting_come_back() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 3.*raised.*OSError"), running(library="/nonexistent/kernel.so"):
        pass


def test_refused_exec_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkerError, match="could not be started"), running():
        pass


@pytest.mark.parametrize("stepping", [False, True], ids=["idle", "stepping"])
def test_killed_worker_is_an_error_at_once(stepping: bool) -> None:
    with running(numel=4_000_000) as (_, process):
        if stepping:
            process.submit([PASS] * 2000)
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 3.*SIGKILL.*exit status -9.*checkpoint"):
            step_for_ever(process)
        assert time.monotonic() - begin < 5


def test_worker_killed_while_starting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = OptimizerProcess._launch

    def launch_and_kill(self, *args):
        process, connection = launch(self, *args)
        process.kill()
        return process, connection

    monkeypatch.setattr(OptimizerProcess, "_launch", launch_and_kill)
    with pytest.raises(WorkerError, match="SIGKILL"), running():
        pass


def test_stopped_worker_runs_into_the_timeout_and_is_killed() -> None:
    with running() as (_, process):
        os.kill(process.pid, signal.SIGSTOP)
        process.submit([PASS])
        with pytest.raises(WorkerError, match=r"did not answer within 0\.3 s"):
            process.wait(timeout_seconds=0.3)
        assert gone(process.pid, 1.0)


def test_orders_that_nobody_reads_run_into_the_timeout() -> None:
    """A message larger than the socket's buffer would otherwise wait for ever."""
    with running(timeout_seconds=2.0) as (_, process):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"did not read its orders within 2 s.*worker_timeout_seconds"):
            process.submit([replace(PASS, partition=index) for index in range(20_000)])
        assert gone(process.pid, 1.0)


def test_interrupts_are_for_the_trainer() -> None:
    """The worker is in no terminal's process group, and one that is sent to it all the same does nothing."""
    with running() as (_, process):
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        os.kill(process.pid, signal.SIGINT)
        process.submit([PASS])
        assert process.wait().number == 1


def test_missing_memory_is_named() -> None:
    """What a worker dies of when the machine has no page for the arena."""
    with running() as (_, process):
        os.kill(process.pid, signal.SIGBUS)
        with pytest.raises(WorkerError, match=r"SIGBUS.*lower host memory use"):
            step_for_ever(process)


TRAINER = """
import os, sys, time
sys.path.insert(0, {root!r})
from tests.unit.test_zenflow_process import *
with running(numel=4_000_000) as (arena, process):
    if {stepping}:
        process.submit([PASS] * 5000)
    child = 0
    if {fork}:  # a DataLoader worker that outlives the trainer and holds a copy of its sockets
        child = os.fork()
        if child == 0:
            time.sleep(60)
    print(process.pid, child, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("stepping", "fork"), [(False, False), (True, False), (True, True)])
def test_killed_trainer_leaves_no_worker(stepping: bool, fork: bool) -> None:
    code = textwrap.dedent(TRAINER).format(root=str(ROOT), stepping=stepping, fork=fork)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker, child = map(int, trainer.stdout.readline().split())
    trainer.kill()
    trainer.wait()
    assert gone(worker, 2.0)
    if fork:
        os.kill(child, signal.SIGKILL)


def test_tiny_memlock_and_no_dev_shm_do_not_matter() -> None:
    """The arena is a memfd and nothing of it is locked by the worker."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    entries = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, before[1]))
    try:
        with running() as (_, process):
            process.submit([PASS])
            process.wait()
            assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= entries
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
