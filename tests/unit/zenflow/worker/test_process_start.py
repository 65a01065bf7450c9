"""Starting the optimizer process: its cores, memory and imports; a failed start leaves no process
behind."""

import os
import resource
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from deepspeed_ext.cores.host import WorkerPlacement
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime import process as runtime_process
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.optimizer_process import PASS, make_plan, running
from tests.support.paths import ROOT
from tests.support.resident import resident_bytes


def test_worker_is_bound_before_it_computes_and_imports_no_torch() -> None:
    cpu = min(os.sched_getaffinity(0))
    with running(placement=WorkerPlacement(frozenset({cpu}))) as (_, process):
        assert os.sched_getaffinity(process.pid) == {cpu}
        assert psutil.Process(process.pid).cpu_affinity() == [cpu]
        if process.ready.kernel == "native":
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" not in maps


@pytest.mark.skipif(library_path() is None, reason="no native kernel and no C++ compiler here")
def test_memory_of_the_worker_does_not_grow_with_the_parameters() -> None:
    """At most 14.5 bytes per parameter in total; the arena takes 14.125 of them (see
    test_arena.py)."""
    own = []
    for numel in (100_000, 8_100_000):
        with running(numel=numel) as (arena, process):
            process.submit([PASS])
            process.wait()
            memory = psutil.Process(process.pid).memory_info()
            own.append(memory.rss - memory.shared)  # without the arena and libraries
            assert resident_bytes(arena) < numel * 14.125 + 10 * 4096
    assert own[1] - own[0] < 0.375 * 8_000_000
    assert own[1] < 64 * 2**20


def test_an_exception_of_the_start_is_raised_in_the_trainer() -> None:
    with (
        pytest.raises(WorkerError, match=r"(?s)rank 3.*raised.*FileNotFoundError"),
        running(library="/nonexistent/kernel.so"),
    ):
        pass


def test_an_interpreter_that_cannot_be_executed_is_an_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    plan = make_plan()
    arena = Arena.create(plan.layout)
    with pytest.raises(WorkerError, match="could not be started"):
        OptimizerProcess(arena, plan, rank=0, timeout_seconds=60.0)
    assert arena.fileno == -1


def test_worker_killed_while_starting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = OptimizerProcess._launch

    def launch_and_kill(self, *args):
        process, connection = launch(self, *args)
        process.kill()
        return process, connection

    monkeypatch.setattr(OptimizerProcess, "_launch", launch_and_kill)
    with pytest.raises(WorkerError, match="SIGKILL"), running():
        pass


def test_the_start_needs_neither_locked_memory_nor_dev_shm() -> None:
    """The arena is a memfd, and the worker locks no pages of it."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    mapped = _in_dev_shm(os.getpid())
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, before[1]))
    try:
        with running() as (_, process):
            process.submit([PASS])
            process.wait()
            assert _in_dev_shm(os.getpid()) <= mapped
            assert not _in_dev_shm(process.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def _in_dev_shm(pid: int) -> set[str]:
    """Files of /dev/shm that a process has mapped or opened."""
    process = psutil.Process(pid)
    paths = [mapping.path for mapping in process.memory_maps()] + [
        file.path for file in process.open_files()
    ]
    return {path for path in paths if path.startswith("/dev/shm/")}


@pytest.mark.parametrize("seconds", [float("inf"), 1e7, 1e20, float("nan"), 0.0])
def test_any_timeout_works_or_leaves_no_process(seconds: float) -> None:
    before = psutil.Process().children()
    try:
        with running(timeout_seconds=seconds) as (_, process):
            process.submit([PASS])
            assert process.wait().number == 1
            assert seconds > 0
    except WorkerError:
        assert not seconds > 0
    assert psutil.Process().children() == before


def test_a_failure_after_the_launch_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OptimizerProcess, "_await", fail)
    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt), running():
        pass
    assert psutil.Process().children() == before


def test_neighbours_of_the_package_do_not_hide_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may lie in a site-packages folder with a backport that must not be imported."""
    package = tmp_path / "deepspeed_ext"
    shutil.copytree(ROOT / "deepspeed_ext", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("enum", "dataclasses", "socket"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.setattr(runtime_process, "START_PROCESS", package / "runtime" / "start_process.py")
    with running() as (_, process):
        process.submit([PASS])
        assert process.wait().number == 1
        maps = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert str(package) in maps


def _inode_mapped_at(address: int) -> int:
    """The file that this process has mapped there; another arena has another number."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (inode,) = [int(line[4]) for line in lines if int(line[0].split("-")[0], 16) == address]
    assert inode
    return inode


def _open_inodes(pid: int) -> set[int]:
    """Of the arenas of which a process has a descriptor."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    arenas = [link for link in links if os.path.lexists(link) and "arena" in os.readlink(link)]
    return {link.stat().st_ino for link in arenas}


def test_core_dumps_and_forked_processes_exclude_the_arena() -> None:
    with running() as (arena, process):
        inode = _inode_mapped_at(arena.address)
        for pid in (os.getpid(), process.pid):
            areas = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
            flags = [
                after.split("\n")[0]
                for before, after in pairwise(areas)
                if "deepspeed_ext-arena" in before
            ]
            assert flags
            assert all({"dd", "dc"} <= set(line.split()) for line in flags)
            assert inode not in _open_inodes(pid)
        child = os.fork()
        if child == 0:
            inherited = "deepspeed_ext-arena" in Path("/proc/self/maps").read_text()
            os._exit(int(inherited))
        assert os.waitpid(child, 0)[1] == 0
        assert arena.tensor("p")[0] == 0
