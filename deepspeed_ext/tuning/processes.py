"""The measuring processes of the tuner, and who else is on their cores."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.affinity.plan import HostPlan
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.host.cgroup import read_throttled_count
from deepspeed_ext.tuning.measuring_process import Move, Steps

__all__ = ["Crew", "Quiet"]

ANSWER_TIMEOUT_SECONDS = 120.0
FOREIGN_LOAD_FRACTION = 0.05
# Not with -m: the requests' classes must be those of the module, not of __main__.
START_WORKER = "from deepspeed_ext.tuning.measuring_process import main; main()"


class Crew:
    """One measuring process a rank, all asked at once."""

    def __init__(self, role: str, places: Sequence[WorkerPlacement], elements: int) -> None:
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._nodes: list[int | None] = [None] * len(places)
        for rank, place in enumerate(places):
            ours, theirs = Pipe()
            arguments = [str(theirs.fileno()), str(place), role, str(rank), str(elements)]
            command = [sys.executable, "-c", START_WORKER, *arguments]
            self.processes.append(
                subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            )
            theirs.close()
            self.connections.append(ours)

    def __enter__(self) -> "Crew":
        try:
            self.collect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def move(self, plan: HostPlan, role: str) -> None:
        """Move each rank's process to its cores in ``plan``; buffers follow to another node."""
        for index, (rank, connection) in enumerate(zip(plan.ranks, self.connections, strict=True)):
            cpus = frozenset(getattr(rank, role))
            node = rank.optimizer_node if role == "optimizer" else rank.numa_node
            threads = len(cpus) if role == "optimizer" else rank.pytorch_threads
            send(connection, Move(cpus, threads, reallocate=self._nodes[index] not in (None, node)))
            self._nodes[index] = node
        self.collect()

    def ask(self, request: Steps) -> list[Any]:
        """Send ``request`` to all and return their answers, in rank order."""
        self.send(request)
        return self.collect()

    def send(self, request: Steps) -> None:
        for connection in self.connections:
            send(connection, request)

    def collect(self) -> list[Any]:
        """One answer of each process.

        Raises:
            WorkerError: a process has ended or does not answer.
        """
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while len(answers) < len(self.connections):
            pending = [connection for connection in self.connections if connection not in answers]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"a measuring process did not answer within {ANSWER_TIMEOUT_SECONDS:.0f} s")
            for connection in ready:
                answers[connection] = self._receive(connection)  # type: ignore[index,arg-type]
        return [answers[connection] for connection in self.connections]

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            process = self.processes[self.connections.index(connection)]
            status = process.wait(timeout=10)
            raise WorkerError(f"a measuring process ended with status {status} (out of memory?)") from None


def send(connection: Connection, request: Move | Steps) -> None:
    try:
        connection.send(request)
    except (BrokenPipeError, ConnectionError):
        raise WorkerError("a measuring process has ended") from None


class Quiet:
    """Was anybody else on the CPUs under test?"""

    def __init__(self, cpus: set[int]) -> None:
        self.cpus = cpus

    def begin(self, pids: Sequence[int]) -> None:
        self.processes = [psutil.Process(pid) for pid in (*pids, os.getpid())]
        self.start, self.busy, self.own = time.monotonic(), self._busy(), self._own()
        self.throttled = read_throttled_count()

    def _busy(self) -> float:
        times = psutil.cpu_times(percpu=True)
        counted = [times[cpu] for cpu in self.cpus if cpu < len(times)]
        return sum(sum(time) - time.idle - getattr(time, "iowait", 0.0) for time in counted)

    def _own(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def verdict(self) -> str:
        """Why the measurement is doubtful; empty if it is not."""
        if read_throttled_count() > self.throttled:
            return "stopped by the CPU quota"
        elapsed = (time.monotonic() - self.start) * len(self.cpus)
        foreign = (self._busy() - self.busy - (self._own() - self.own)) / elapsed
        # Kernel clocks tick every 10 ms: a short measurement proves nothing.
        if elapsed > 0.2 and foreign > FOREIGN_LOAD_FRACTION:
            return f"other processes used {foreign:.0%} of the cores under test"
        return ""
