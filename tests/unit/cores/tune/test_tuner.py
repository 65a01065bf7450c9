"""The tuner's measurements: one real, short run, and what surrounds it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import asdict, replace
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from deepspeed_ext.cores.report import read_host
from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.cores.topology import read_cache_bytes
from deepspeed_ext.cores.tune import measuring_process, processes, tuner
from deepspeed_ext.cores.tune.measuring_process import Steps
from deepspeed_ext.cores.tune.processes import ForeignLoad, MeasuringProcesses
from deepspeed_ext.cores.tune.tuner import Tuner, TuneSettings
from deepspeed_ext.errors import OutOfMemoryError, WorkerError
from deepspeed_ext.zenflow.worker.kernel import load_kernel
from tests.support.paths import ROOT
from tests.support.sysfs import write_host
from tests.support.topologies import cores

CPUS = sorted(os.sched_getaffinity(0))


def test_cache_bytes_count_each_last_level_cache_once(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8, 8, 4))
    assert read_cache_bytes(tmp_path) == 2 * (32 << 20)


def test_a_failing_worker_is_one_failed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TuneSettings(elements=1 << 40)
    with Tuner(read_host("/"), settings) as tuner:
        failed = tuner.measure(1)
        assert failed.gb_per_s == 0.0
        assert "status" in failed.noise
        json.dumps(asdict(failed), allow_nan=False)  # --json prints it, and JSON has no infinity
        monkeypatch.setattr(tuner, "measure", lambda cores: replace(failed, cores=cores))
        with pytest.raises(WorkerError, match="no number of cores"):
            tuner.run()


def test_buffers_take_a_quarter_of_what_is_left_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "available_host_bytes", lambda: 2 << 20)
    assert TuneSettings.for_host(2, quick=True).elements == (2 << 20) // 4 // (
        2 * tuner.STATE_BYTES_PER_ELEMENT
    )
    monkeypatch.setattr(tuner, "available_host_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match="free host memory"):
        TuneSettings.for_host(2, quick=True)


def test_foreign_load_is_noticed() -> None:
    quiet = ForeignLoad({CPUS[0]})
    code = "import time; end = time.time() + 1.0\nwhile time.time() < end: pass"
    with subprocess.Popen(["taskset", "-c", str(CPUS[0]), sys.executable, "-c", code]) as other:
        quiet.begin([])
        other.wait()
        assert "other processes" in quiet.verdict()


def test_load_is_that_of_the_cpus_of_these_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU 1 is offline, so the second line of the kernel's table is that of CPU 2."""
    Times = namedtuple("Times", ["user", "idle", "iowait"])
    table = [Times(busy, 1000.0, 100.0) for busy in (1.0, 20.0, 300.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: table)
    monkeypatch.setattr(processes, "read_online", lambda: frozenset({0, 2, 3}))
    assert [ForeignLoad(cpus)._busy() for cpus in ({0}, {2}, {3}, {2, 3}, {1})] == [
        1.0,
        20.0,
        300.0,
        320.0,
        0.0,
    ]


def test_modules_of_the_working_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "json", "queue", "torch", "signal", "psutil", "deepspeed"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the folder')")
    monkeypatch.chdir(tmp_path)
    with MeasuringProcesses("training", [WorkerPlacement(frozenset(CPUS[:1]))], 0) as processes:
        assert len(processes.pids) == 1


def test_measuring_processes_run_on_their_cores_and_none_is_left() -> None:
    place = WorkerPlacement(frozenset(CPUS[:1]))
    with MeasuringProcesses("optimizer", [place, place], 1 << 16) as processes:
        answers = processes.ask(Steps(3))
        pids = processes.pids
        masks = [os.sched_getaffinity(pid) for pid in pids]
    assert [len(seconds) for seconds in answers] == [3, 3]
    assert masks == [set(CPUS[:1])] * 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_process_that_cannot_start_leaves_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("no more processes")
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[0]

    fake = SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(processes, "subprocess", fake)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(WorkerError, match="could not be started: no more processes"):
        MeasuringProcesses("training", [WorkerPlacement(frozenset(CPUS[:1]))] * 2, 0)
    assert started[0].poll() == -signal.SIGKILL
    assert os.listdir("/proc/self/fd") == before


class Stuck:
    """A process in an uninterruptible call: it is killed, and does not end."""

    pid = 1 << 30

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "this wait would never end"
        raise subprocess.TimeoutExpired("rank", timeout)


def test_a_process_that_does_not_end_is_one_failed_point() -> None:
    """Neither the end of the measurement nor the question for its status waits for it without
    end."""
    crew = MeasuringProcesses("training", [], 0)
    ours, theirs = Pipe()
    theirs.close()
    crew.connections.append(ours)
    crew.processes.append(Stuck())  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="does not exit"), crew:
        pass
    load = ForeignLoad({CPUS[0]})
    with pytest.raises(WorkerError, match="ended between two measurements"):
        load.begin([Stuck.pid])


UNDISTURBED = """
from deepspeed_ext.commands.main import main
from deepspeed_ext.cores.tune import processes, tuner

processes.ForeignLoad.verdict = lambda load: ""
tuner.NOISY_SPREAD = float("inf")
raise SystemExit(main())
"""
"""The command on a machine that is quiet, whatever runs beside this test."""


def test_a_quick_run_prints_and_writes_its_result(tmp_path: Path) -> None:
    picture = tmp_path / "tune.png"
    output = tmp_path / "tune.json"
    options = [
        "--quick",
        "--json",
        "--elements",
        str(1 << 20),
        "--ranks",
        "1",
        "--plot",
        str(picture),
        "--output",
        str(output),
    ]
    command = [sys.executable, "-c", UNDISTURBED, "tune", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(output.read_text()) == result
    assert 1 <= result["opt_cores_per_rank"] <= max(1, len(CPUS) - 1)
    records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert {record["optimizer_cores"] for record in records} == {
        number["cores"] for number in result["points"]
    }
    assert result["training"]["splits"][0]["step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_kernel_that_is_measured_is_made_once_for_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference kernel's pool is what is measured if there is no compiler; other numbers of
    threads are too."""
    made: list[int] = []

    def load(library: str | None, threads: int) -> Any:
        made.append(threads)
        return load_kernel(library, threads)

    monkeypatch.setattr("deepspeed_ext.zenflow.worker.kernel.library_path", lambda: None)
    monkeypatch.setattr("deepspeed_ext.zenflow.worker.kernel.load_kernel", load)
    threads = torch.get_num_threads()
    try:
        worker = measuring_process._Worker(lambda: measuring_process.adam_pass_step(1 << 12), 2)
        worker.steps(Steps(3))
        worker.move(measuring_process.Move(frozenset(os.sched_getaffinity(0)), 3, reallocate=False))
        worker.steps(Steps(3))
    finally:
        torch.set_num_threads(threads)
    assert made == [2, 3]
