"""The optimizer process: a life with a start and an end, and no hang and no orphan whatever happens in between."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.zenflow.kernel import AdamStep, Publish, library_path
from deepspeed_ext.zenflow.worker import process as process_module
from deepspeed_ext.zenflow.worker.arena import Arena, plan_layout
from deepspeed_ext.zenflow.worker.messages import PartitionPass, WorkerPlan, partition_specs
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

ROOT = Path(__file__).resolve().parents[2]
NUMEL = 10_000
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1, 1.0)
PASS = PartitionPass(0, (0,), (STEP,), Publish.exact(STEP.bias_correction2_sqrt, STEP.eps))


def make_plan(numel: int = NUMEL, **changes) -> WorkerPlan:
    dtypes = {"publish_dtype": "bfloat16", "grad_dtype": "bfloat16", "per_block": ("block_means", "float32", True)}
    layout = plan_layout(partition_specs(0, numel, block_size=32, slots=1, touched_slots=1, **dtypes))
    return replace(WorkerPlan(layout, 32, None, 1, library_path()), **changes)


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
        arena.tensor("p").copy_(parameter.detach())
        parameter.grad = torch.randn(NUMEL).bfloat16().float()
        arena.tensor("g").copy_(parameter.grad)
        process.submit([PASS])
        done = process.wait()
        assert (done.number, done.seconds > 0) == (1, True)
        torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1).step()
        torch.testing.assert_close(arena.tensor("p"), parameter.detach(), rtol=2e-6, atol=1e-8)
        assert torch.equal(arena.tensor("y"), arena.tensor("p").bfloat16())


def test_submissions_are_done_in_order_and_waited_for_together() -> None:
    with running() as (arena, process):
        arena.tensor("g").fill_(1.0)
        for _ in range(3):
            process.submit([PASS])
        assert process.wait().number == 3
        assert torch.allclose(arena.tensor("m"), torch.tensor(1 - 0.9**3))


def test_worker_is_bound_before_it_computes_and_imports_no_torch() -> None:
    cpu = min(os.sched_getaffinity(0))
    with running(placement=str(WorkerPlacement(frozenset({cpu})))) as (_, process):
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
    plan = make_plan()
    with running() as (_, process):
        pid = OptimizerProcess(Arena.create(plan.layout), plan, rank=0, timeout_seconds=60).pid
        assert gone(pid, 3.0)
        process.submit([PASS])
        assert process.wait().number == 1


def test_exceptions_of_the_worker_come_back() -> None:
    with running() as (_, process):
        process.submit([replace(PASS, slots=(7,))])
        with pytest.raises(WorkerError, match=r"(?s)rank 3.*pid.*KeyError: ArrayKey\(.*slot=7\).*checkpoint"):
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
    with running() as (_, process):
        process._timeout_seconds = 2.0
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


SUSPENDED = """
import os, sys, time
sys.path.insert(0, {root!r})
os.close(0)  # as a job without stdin
from deepspeed_ext.zenflow.worker.arena import Arena, ArraySpec, plan_layout
from deepspeed_ext.zenflow.worker.messages import WorkerPlan
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
layout = plan_layout([ArraySpec("p", "float32", 5)])
arena = Arena.create(layout)
process = OptimizerProcess(arena, WorkerPlan(layout, 32, None, 1, {library!r}), rank=0, timeout_seconds=1.0)
for number in range(2):
    print(process.pid, flush=True)
    os.read(3, 1)  # the test has stopped the worker
    process.submit([])
    print(process.wait().number, flush=True)
"""


@pytest.mark.skipif(library_path() is None, reason="the reference kernel imports torch, for longer than the timeout")
def test_a_job_that_is_suspended_or_without_stdin_goes_on(tmp_path: Path) -> None:
    """Trainer and worker are stopped for longer than the timeout, and the trainer is the first to go on."""
    code = textwrap.dedent(SUSPENDED).format(root=str(ROOT), library=library_path())
    reading, writing = os.pipe()
    wrapper = f"import os; os.dup2({reading}, 3); exec({code!r})"
    command = [sys.executable, "-c", wrapper]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[reading])
    try:
        worker = int(trainer.stdout.readline())
        os.kill(worker, signal.SIGSTOP)
        os.write(writing, b"x")
        while psutil.Process(trainer.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        trainer.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # the suspension
        trainer.send_signal(signal.SIGCONT)
        time.sleep(0.2)  # the trainer looks first
        os.kill(worker, signal.SIGCONT)
        os.write(writing, b"x")
        assert trainer.stdout.read().split() == ["1", str(worker), "2"]
        assert trainer.wait() == 0
    finally:
        trainer.kill()
        trainer.wait()
        os.close(reading)
        os.close(writing)


STRANGER = """
import os, pickle, struct, sys, time
sys.path.insert(0, {root!r})
from deepspeed_ext.zenflow.worker.messages import Done
class Missing:
    pass
def message(value):
    body = pickle.dumps(value)
    return struct.pack("!4sQ", b"dsxt", len(body)) + body
os.write(int(sys.argv[1]), {what})
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("message(Done(1, 0.0))[:-1]", "did not start within 2 s"),
        ("b'\\0' * 3", "did not start within 2 s"),
        ("b'Segmentation fault'", "invalid answer.*not the header of a message: b'Segmentation"),
        ("struct.pack('!4sQ', b'dsxt', 1 << 62)", "invalid answer"),
        ("struct.pack('!4sQ', b'dsxt', 3) + b'abc'", "invalid answer.*UnpicklingError"),
        ("message(Missing())", "invalid answer.*AttributeError"),
        ("message(7)", "invalid answer.*7 after answer 0 of 0"),
        ("message(Done(9, 0.0))", "invalid answer.*number=9"),
    ],
)
def test_what_is_not_an_answer_is_an_error(
    what: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "stranger.py"
    script.write_text(textwrap.dedent(STRANGER).format(root=str(ROOT), what=what))
    monkeypatch.setattr(process_module, "_SCRIPT", script)
    before = psutil.Process().children()
    with pytest.raises(WorkerError, match=rf"(?s)rank 3.*{says}"), running(timeout_seconds=2.0):
        pass
    assert psutil.Process().children() == before


def test_a_lost_copy_of_a_socket_hides_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked by another thread during the launch has the worker's end, and keeps it open."""
    copies = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            copies.append(os.dup(kwargs["pass_fds"][0]))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(process_module.subprocess, "Popen", Popen)
    with running() as (_, process):
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="SIGKILL"):
            step_for_ever(process)
        assert time.monotonic() - begin < 10
    os.close(copies.pop())


def test_close_reaches_the_worker_past_a_forked_copy_of_our_end() -> None:
    with running() as (_, process):
        copy = os.dup(process._channel._end.fileno())
        process.close()
        assert process._process.returncode == 0
        os.close(copy)


def test_an_idle_death_is_noticed_without_work() -> None:
    with running() as (_, process):
        os.kill(process.pid, signal.SIGKILL)
        assert gone(process.pid, 5.0)
        assert process.wait().number == 0  # nothing was in flight: what is in the arena is complete
        for ask in (process.require_alive, process.wait, process.require_alive):
            with pytest.raises(WorkerError, match="SIGKILL"):
                ask()


def test_two_threads_wait() -> None:
    found: list[int] = []
    with running() as (_, process):

        def wait() -> None:
            found.append(process.wait().number)

        for number in range(1, 6):
            os.kill(process.pid, signal.SIGSTOP)
            process.submit([PASS])
            threads = [threading.Thread(target=wait) for _ in range(2)]
            for thread in threads:
                thread.start()
            os.kill(process.pid, signal.SIGCONT)
            for thread in threads:
                thread.join()
            assert found[-2:] == [number] * 2
    assert len(found) == 10


def test_a_signal_handler_waits_while_its_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (_, process):
        found = []

        def handle(*_: object) -> None:
            os.kill(process.pid, signal.SIGCONT)
            found.append(process.wait().number)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            os.kill(process.pid, signal.SIGSTOP)
            process.submit([PASS])
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert process.wait().number == 1
        finally:
            signal.signal(signal.SIGALRM, before)
        assert found == [1]
        with process._alone(), pytest.raises(WorkerError, match="signal handler"):
            process.wait()
        process.submit([PASS])
        assert process.wait().number == 2


@pytest.mark.parametrize("seconds", [float("inf"), 1e7, 1e20, float("nan"), 0.0])
def test_any_timeout_works_or_leaves_nothing(seconds: float) -> None:
    before = psutil.Process().children()
    try:
        with running(timeout_seconds=seconds) as (_, process):
            process.submit([PASS])
            assert process.wait().number == 1
            assert seconds > 0
    except WorkerError:
        assert not seconds > 0
    assert psutil.Process().children() == before


def test_a_failure_after_the_launch_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OptimizerProcess, "_await", fail)
    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt), running():
        pass
    assert psutil.Process().children() == before


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    with running() as (_, process):
        os.kill(process.pid, signal.SIGRTMIN + 1)
        with pytest.raises(WorkerError, match=rf"killed by signal {signal.SIGRTMIN + 1} "):
            step_for_ever(process)


def test_neighbours_of_the_package_do_not_hide_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may lie in a site-packages folder with a backport that must not be imported."""
    package = tmp_path / "deepspeed_ext"
    shutil.copytree(ROOT / "deepspeed_ext", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("enum", "dataclasses", "socket"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.setattr(process_module, "_SCRIPT", package / "zenflow" / "worker" / "start_worker.py")
    with running() as (_, process):
        process.submit([PASS])
        assert process.wait().number == 1
        maps = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert str(package) in maps


def test_the_arena_is_in_no_core_dump_and_in_no_forked_process() -> None:
    with running() as (arena, process):
        for pid in (os.getpid(), process.pid):
            areas = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
            flags = [after.split("\n")[0] for before, after in pairwise(areas) if "deepspeed_ext-arena" in before]
            assert flags
            assert all({"dd", "dc"} <= set(line.split()) for line in flags)
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(link)]
            assert not [link for link in links if "arena" in link]
        child = os.fork()
        if child == 0:
            inherited = "deepspeed_ext-arena" in Path("/proc/self/maps").read_text()
            os._exit(int(inherited))
        assert os.waitpid(child, 0)[1] == 0
        assert arena.tensor("p")[0] == 0
