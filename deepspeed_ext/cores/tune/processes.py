"""Starts the tuner's measuring processes and detects other load on their cores."""

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

from deepspeed_ext.cores.plan import HostPlan
from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.cores.topology import read_online
from deepspeed_ext.cores.tune.measuring_process import Move, Steps
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime.cgroup import read_throttled_count
from deepspeed_ext.runtime.child_process import python_command

__all__ = ["MeasuringProcesses", "ForeignLoad"]

ANSWER_TIMEOUT_SECONDS = 120.0
END_SECONDS = 10.0
"""Longest time for a process to end after it was killed or its connection was closed, on a busy
machine."""
FOREIGN_LOAD_FRACTION = 0.05
# Not run as __main__: requests must unpickle to the classes of the module.
MODULE = "deepspeed_ext.cores.tune.measuring_process"


class MeasuringProcesses:
    """One measuring process per rank; a context manager that ends them.

    Args:
        role: ``training`` or ``optimizer``.
        placements: where each rank's process starts, in rank order.
        elements: number of fp32 parameters that an optimizer step updates; 0 for training.

    Raises:
        WorkerError: a process cannot be started; none is left.
    """

    def __init__(self, role: str, placements: Sequence[WorkerPlacement], elements: int) -> None:
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._nodes: list[int | None] = [None] * len(placements)
        try:
            for rank, placement in enumerate(placements):
                self._start([str(placement), role, str(rank), str(elements)])
        except OSError as error:
            self.__exit__()
            raise WorkerError(
                f"a measuring process could not be started: {error}. Raise this user's limits on "
                "processes and open files (ulimit -u, ulimit -n), or free memory"
            ) from error
        except BaseException:
            self.__exit__()
            raise

    def _start(self, arguments: list[str]) -> None:
        ours, theirs = Pipe()
        self.connections.append(ours)
        with theirs:
            command = python_command(MODULE, str(theirs.fileno()), *arguments)
            self.processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )

    def __enter__(self) -> "MeasuringProcesses":
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
        for process in self.processes:
            # stuck in an uninterruptible call: it dies afterwards
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self.processes]

    def move(self, plan: HostPlan, role: str) -> None:
        """Move each rank's process to its cores in ``plan``; on another NUMA node it allocates its
        buffers again."""
        for index, (rank, connection) in enumerate(zip(plan.ranks, self.connections, strict=True)):
            cpus = frozenset(getattr(rank, role))
            node = rank.optimizer_node if role == "optimizer" else rank.numa_node
            threads = len(cpus) if role == "optimizer" else rank.pytorch_threads
            send(connection, Move(cpus, threads, reallocate=self._nodes[index] not in (None, node)))
            self._nodes[index] = node
        self.collect()

    def ask(self, request: Steps) -> list[Any]:
        """Send ``request`` to all processes and return their answers, in rank order."""
        self.send(request)
        return self.collect()

    def send(self, request: Steps) -> None:
        """Send ``request`` to all processes; `collect` waits for the answers."""
        for connection in self.connections:
            send(connection, request)

    def collect(self) -> list[Any]:
        """Receive one answer from each process, in rank order.

        Raises:
            WorkerError: a process has ended or does not answer in time.
        """
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while len(answers) < len(self.connections):
            pending = [connection for connection in self.connections if connection not in answers]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(
                    "a measuring process did not answer within "
                    f"{ANSWER_TIMEOUT_SECONDS:.0f} s; check this host's load"
                )
            for connection in ready:
                answers[connection] = self._receive(connection)  # type: ignore[index,arg-type]
        return [answers[connection] for connection in self.connections]

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            process = self.processes[self.connections.index(connection)]
            try:
                how = f"ended with status {process.wait(END_SECONDS)}"
            except subprocess.TimeoutExpired:
                how = "closed its connection but does not exit"
            raise WorkerError(
                f"a measuring process {how}; if memory was short, lower --elements"
            ) from None


def send(connection: Connection, request: Move | Steps) -> None:
    """Send `request` to one process.

    Raises:
        WorkerError: the process has ended.
    """
    try:
        connection.send(request)
    except (BrokenPipeError, ConnectionError):
        raise WorkerError(
            "a measuring process has ended; if memory was short, lower --elements"
        ) from None


class ForeignLoad:
    """Detects load of other processes, and throttling by a CPU quota, on the CPUs under test."""

    def __init__(self, cpus: set[int]) -> None:
        self.cpus = cpus

    def begin(self, pids: Sequence[int]) -> None:
        """Start watching; ``pids`` and this process do not count as other load.

        Raises:
            WorkerError: one of these processes has ended.
        """
        self.pids = (*pids, os.getpid())
        self.start, self.busy, self.own = time.monotonic(), self._busy(), self._own()
        self.throttled = read_throttled_count()

    def _busy(self) -> float:
        # psutil lists the online CPUs in the order of their numbers, which may have gaps.
        times = dict(zip(sorted(read_online()), psutil.cpu_times(percpu=True), strict=False))
        counted = [times[cpu] for cpu in self.cpus if cpu in times]
        return sum(sum(time) - time.idle - getattr(time, "iowait", 0.0) for time in counted)

    def _own(self) -> float:
        try:
            return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids)
        except psutil.NoSuchProcess as error:
            raise WorkerError(
                f"a measuring process ended between two measurements: {error}"
            ) from None

    def verdict(self) -> str:
        """Say why the measurement since `begin` is doubtful; empty if it is not.

        Raises:
            WorkerError: one of the processes of `begin` has ended.
        """
        if read_throttled_count() > self.throttled:
            return "throttled by the CPU quota"
        elapsed = (time.monotonic() - self.start) * len(self.cpus)
        foreign = (self._busy() - self.busy - (self._own() - self.own)) / elapsed
        # Kernel clocks tick every 10 ms, so a short measurement is too coarse.
        if elapsed > 0.2 and foreign > FOREIGN_LOAD_FRACTION:
            return f"other processes used {foreign:.0%} of the cores under test"
        return ""
