"""The processes of one way to place a training: started by whoever binds them, ordered over a
socket, and ended."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from deepspeed_ext.runtime.cpulist import parse_cpulist
from tests.perf import report
from tests.perf.binding_ways import Facts, Load, Place, Task, Turn, Way

TIMEOUT_SECONDS = 240.0
END_SECONDS = 10.0
OPENMP_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")


class TeamError(RuntimeError):
    """A team does not start or does not answer."""


@dataclass
class Team:
    """The processes of one way.

    Attributes:
        facts: of each process, by load and rank.
        ports: of the process groups that DeepSpeed's launcher makes.
    """

    tasks: tuple[Task, ...]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: dict[tuple[Load, int], Connection] = field(default_factory=dict)
    facts: dict[tuple[Load, int], Facts] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)

    @property
    def way(self) -> Way:
        """How all of its processes are placed."""
        return self.tasks[0].way

    @classmethod
    def start(cls, tasks: Sequence[Task]) -> Team:
        """Start a process for each task and rank, and wait until all are warm.

        Args:
            tasks: alike but for their loads; what is told of files is filled in here.

        Raises:
            TeamError: one of them ended, or took too long.
        """
        folder = Path(tempfile.mkdtemp(prefix="dsext-binding-"))
        files = {"address": str(folder / "orders"), "rendezvous": str(folder / "rendezvous")}
        team = cls(tuple(replace(task, **files) for task in tasks), folder)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(files["address"])
                listener.listen()
                listener.settimeout(0.5)
                team._launch()
                team._welcome(listener)
            team.facts = {key: team._answer(key) for key in team.connections}
        except BaseException:
            team.close()
            raise
        return team

    def _launch(self) -> None:
        for task in self.tasks:
            path = self.folder / f"{task.load}.task"
            path.write_bytes(pickle.dumps(task))
            for rank in [0] if task.way.launcher == "deepspeed" else range(len(task.places)):
                words = command(task, rank, path)
                if "--master_port" in words:
                    self.ports.append(words[words.index("--master_port") + 1])
                with open(self.folder / "log", "ab") as log:
                    process = subprocess.Popen(
                        words,
                        env=environment(task, rank),
                        cwd=report.ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                self.processes.append(process)

    def _welcome(self, listener: socket.socket) -> None:
        expected = sum(len(task.places) for task in self.tasks)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self.connections) < expected:
            try:
                accepted = listener.accept()[0]
            except TimeoutError:
                self._require_alive(deadline)
                continue
            connection = Connection(accepted.detach())
            self.connections[connection.recv()] = connection

    def _require_alive(self, deadline: float) -> None:
        ended = [process.args for process in self.processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            what = (
                f"ended: {ended[0]!r}"
                if ended
                else f"does not answer within {TIMEOUT_SECONDS:.0f} s"
            )
            raise TeamError(f"{self.way.name}, a process {what}\n{self._log_end()}")

    def _log_end(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def _answer(self, key: tuple[Load, int]) -> Any:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.connections[key].poll(0.5):
            self._require_alive(deadline)
        try:
            return self.connections[key].recv()
        except EOFError:
            raise TeamError(f"{self.way.name}, {key} has ended\n{self._log_end()}") from None

    def turn(self, count: int, seconds: float) -> dict[tuple[Load, int], Turn]:
        """What each process reports of at least `count` steps in at least `seconds`, all at
        once."""
        for connection in self.connections.values():
            connection.send((count, seconds))
        return {key: self._answer(key) for key in self.connections}

    def close(self) -> None:
        """End the processes, and whatever they have started."""
        for connection in self.connections.values():
            connection.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            family = _family(process)
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if self.connections else 0.0)
            except subprocess.TimeoutExpired:
                family = _family(process)
            for member in family:
                if member.is_running():
                    member.kill()
            process.wait()
        # DeepSpeed's operator for all-reduce on the host leaves its buffers behind
        for port in self.ports:
            for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def command(task: Task, rank: int, path: Path) -> list[str]:
    """What starts one rank, or with DeepSpeed's launcher, all of them."""
    module = "tests.perf.binding_worker"
    if task.way.launcher == "deepspeed":
        launcher = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus",
            str(len(task.places)),
        ]
        return [
            *launcher,
            "--master_port",
            str(_free_port()),
            "--bind_cores_to_rank",
            "--module",
            module,
            str(path),
        ]
    prefix = (
        ["taskset", "-c", _cpus_at_launch(task, rank)] if task.way.launcher == "taskset" else []
    )
    return [*prefix, sys.executable, "-m", module, str(path)]


def _cpus_at_launch(task: Task, rank: int) -> str:
    place: Place = task.places[rank]
    return {"training": place.training, "optimizer": place.optimizer}.get(task.load, place.rank)


def environment(task: Task, rank: int) -> dict[str, str]:
    """The variables of one rank's process; nothing of OpenMP but what the way sets."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(OPENMP_PREFIXES)
    }
    ranks, place = str(len(task.places)), task.places[rank]
    kept |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    kept |= {"DSEXT_LOG_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    if task.device == "cpu":
        kept |= {"DS_ACCELERATOR": "cpu"}
    if task.way.launcher == "taskset":
        cores = {"training": place.training_cores, "optimizer": len(parse_cpulist(place.optimizer))}
        kept["OMP_NUM_THREADS"] = str(cores.get(task.load, place.cores))
    if task.way.asleep:
        kept["OMP_WAIT_POLICY"] = "passive"
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
