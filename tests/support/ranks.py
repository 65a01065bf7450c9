"""Run a function on several ranks, as real processes that are kept between tests.

`run_ranks` is what nearly every multi-rank test uses. `run_fresh_ranks` starts new processes and
reports how each ended, for tests in which a rank is meant to die. A body is a module-level function
of a test module; it is sent by name, called with torch.distributed initialised, and its return
value travels back by pickle. The backend is gloo on the CPU and NCCL on an accelerator; when ranks
must share one, that of `tests.support.shared_device`. The rendezvous is always a file, never a
port. On the device "sim", the ranks have the simulated accelerator; so they have on others
after `simulate`.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, BinaryIO

from tests.support import shared_device
from tests.support.paths import ROOT
from tests.support.rank_nursery import ForkedRank, Nursery
from tests.support.worker_nursery import FORKS_WORKERS

START_TIMEOUT_SECONDS = 300.0  # an operator may have to be compiled first
GRACE_SECONDS = 3.0
MOST_LOGGED = 4000
SHORT_DUMPS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
"""NCCL's watchdog ends a rank whose peer has died. Before, it gives all ranks four times this to
write what they know: by default that is a minute."""


class RankError(AssertionError):
    """A body failed, died or did not finish on some rank."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended: its value, its error text, or neither if the process died (then
    `exit_code` says how).

    Attributes:
        hung: it had not ended in its time although no rank had failed; `error` says so, too.
        log: the end of what it wrote, of `run_fresh_ranks`; with its stacks if it had to be ended.
    """

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    hung: bool = False
    log: str = ""


class RankPool:
    """`world_size` processes that run bodies until closed.

    Args:
        forks_workers: their optimizer processes are forks of one, see
            `tests.support.worker_nursery`.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        group_timeout_seconds: float = 900.0,
        *,
        forks_workers: bool = False,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="dsext-ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            environment = self._environment(rank, device, group_timeout_seconds)
            if forks_workers:
                environment[FORKS_WORKERS] = "1"
            with open(self._log_path(rank), "wb") as log:
                forks = device == "sim" or (device != "accelerator" and nursery(device).can_fork)
                start = nursery(device).start if forks else _start_alone
                self.processes.append(start(environment, theirs.fileno(), log))
            theirs.close()
            self.connections.append(ours)
        self._require(self._collect(start_timeout_seconds), "start")

    def _environment(self, rank: int, device: str, group_timeout_seconds: float) -> dict[str, str]:
        unwanted = ("MASTER_ADDR", "MASTER_PORT")
        environment = {name: each for name, each in os.environ.items() if name not in unwanted}
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
            LOCAL_SIZE=str(self.world_size),
            OMP_NUM_THREADS="1",
            DSEXT_TEST_RENDEZVOUS=str(self.folder / "rendezvous"),
            DSEXT_TEST_GROUP_TIMEOUT_SECONDS=str(group_timeout_seconds),
        )
        if device == "cpu":
            environment["DS_ACCELERATOR"] = "cpu"
        else:
            environment.pop("DS_ACCELERATOR", None)
        if device == "sim":
            environment.setdefault("SIMULATED_DEVICES", str(self.world_size))
        if device == "accelerator":
            environment |= SHORT_DUMPS | shared_device.environment(rank, self.world_size)
        return environment

    def _log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def run(
        self,
        body: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        timeout_seconds: float,
        grace_seconds: float = GRACE_SECONDS,
    ) -> list[RankOutcome]:
        """Run `body` on every rank and return how each ended; the pool is unusable if any did not
        return.

        Args:
            grace_seconds: how long the others may take to end once one has failed.
        """
        module = body.__module__
        if module == "__main__":  # a benchmark started with python -m
            module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
        task = pickle.dumps((module, body.__qualname__, args, kwargs))
        for connection in self.connections:
            connection.send_bytes(task)
        return self._collect(timeout_seconds, grace_seconds)

    def _collect(
        self, timeout_seconds: float, grace_seconds: float = GRACE_SECONDS
    ) -> list[RankOutcome]:
        outcomes: dict[int, RankOutcome] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(outcomes) < self.world_size and (left := deadline - time.monotonic()) > 0:
            pending = {
                self.connections[rank]: rank
                for rank in range(self.world_size)
                if rank not in outcomes
            }
            for ready in wait(list(pending), timeout=left):
                rank = pending[ready]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error or outcomes[rank].exit_code is not None:
                    # The others may now wait for this rank for ever;
                    # give them only a moment to say why they end.
                    deadline = min(deadline, time.monotonic() + grace_seconds)
        for rank in set(range(self.world_size)) - set(outcomes):
            # the worker dumps its stacks into the log
            self.processes[rank].send_signal(signal.SIGUSR1)
        if len(outcomes) < self.world_size:
            time.sleep(0.5)
        has_failed = any(o.error or o.exit_code is not None for o in outcomes.values())
        why = (
            "was still running when another rank failed"
            if has_failed
            else f"did not finish within {timeout_seconds:.0f} s"
        )
        unfinished = RankOutcome(error=why, hung=not has_failed)
        return [outcomes.get(rank, unfinished) for rank in range(self.world_size)]

    def _exit_code(self, rank: int) -> int:
        """The exit code of a process that has closed its connection. Freeing 100 GiB of page-locked
        memory takes a while."""
        try:
            return self.processes[rank].wait(timeout=120)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _receive(self, rank: int) -> RankOutcome:
        try:
            message = self.connections[rank].recv_bytes()
        except (EOFError, ConnectionError):
            return RankOutcome(exit_code=self._exit_code(rank))
        try:
            value, error = pickle.loads(message)
        # an error of this rank, so that the answers of the others are not taken for a later test's
        except Exception:
            return RankOutcome(
                error="the return value cannot be unpickled:\n" + traceback.format_exc()
            )
        return RankOutcome(value=value, error=error)

    def signal_all(self, number: int) -> None:
        """Send every rank a signal."""
        for process in self.processes:
            process.send_signal(number)

    def _require(self, outcomes: list[RankOutcome], what: str) -> list[Any]:
        failed = [rank for rank, o in enumerate(outcomes) if o.error or o.exit_code is not None]
        if not failed:
            return [outcome.value for outcome in outcomes]
        parts = [f"{what}: ranks {failed} of {self.world_size} failed"]
        for rank in failed:
            outcome = outcomes[rank]
            said = outcome.error or f"process ended with {outcome.exit_code}"
            parts.append(f"--- rank {rank}: {said}\n{self.log(rank)}")
        self.close()
        raise RankError("\n".join(parts))

    def log(self, rank: int) -> str:
        """The end of what a rank has written."""
        return self._log_path(rank).read_text(errors="replace")[-MOST_LOGGED:]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(timeout=10)
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _start_alone(
    environment: dict[str, str], connection: int, log: BinaryIO
) -> subprocess.Popen[bytes]:
    """A rank in a process that imports everything itself: an accelerator may not be initialised
    before a fork."""
    command = [sys.executable, "-m", "tests.support.rank_worker", str(connection)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        pass_fds=[connection],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


@functools.cache
def nursery(device: str = "cpu") -> Nursery:
    """The process that forks the ranks of this one."""
    return Nursery(device)


_simulated: frozenset[str] = frozenset()


def simulate(*devices: str) -> None:
    """From now on, "cpu" or "accelerator", whichever is among `devices`, means the simulated
    accelerator."""
    global _simulated
    _simulated = frozenset(devices)


_pools: dict[tuple[int, str, str, bool], RankPool] = {}
_forks_workers = False


def fork_workers() -> None:
    """From now on, ranks fork their optimizer processes, but for those on a real accelerator. What
    measures leaves them to be started, as users' are."""
    global _forks_workers
    _forks_workers = True


@contextmanager
def started_workers() -> Iterator[None]:
    """Inside, ranks start their optimizer processes whatever was said."""
    global _forks_workers
    before, _forks_workers = _forks_workers, False
    try:
        yield
    finally:
        _forks_workers = before


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    pool: str = "",
    timeout_seconds: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``body(*args, **kwargs)`` on `world_size` ranks and return their values in rank order.

    Calls with another `pool` run in other processes. Between calls the processes are stopped:
    Gloo has a thread for each group that wakes up a hundred times a second, and the kept ranks of
    a session have hundreds of groups.

    Raises:
        RankError: a rank raised, died or did not finish in time; the message holds its traceback
            and its log.
    """
    device = _device(device)
    forks_workers = _forks(device)
    key = (world_size, device, pool, forks_workers)
    if key not in _pools:
        _pools[key] = RankPool(world_size, device, forks_workers=forks_workers)
    chosen = _pools[key]
    chosen.signal_all(signal.SIGCONT)
    outcomes = chosen.run(body, args, kwargs, timeout_seconds)
    try:
        values = chosen._require(outcomes, body.__qualname__)
    except RankError:
        del _pools[key]
        raise
    if device != "accelerator":  # NCCL's watchdog would take the rest for a hang
        chosen.signal_all(signal.SIGSTOP)
    return values


def run_fresh_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    timeout_seconds: float = 120.0,
    group_timeout_seconds: float = 60.0,
    grace_seconds: float = GRACE_SECONDS,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Like `run_ranks`, in new processes that end with the call; returns how each rank ended
    instead of raising. `group_timeout_seconds` is that of all process groups, also of those that
    DeepSpeed makes."""
    device = _device(device)
    pool = RankPool(world_size, device, group_timeout_seconds, forks_workers=_forks(device))
    try:
        outcomes = pool.run(body, args, kwargs, timeout_seconds, grace_seconds)
        return [replace(outcome, log=pool.log(rank)) for rank, outcome in enumerate(outcomes)]
    finally:
        pool.close()


def _forks(device: str) -> bool:
    return _forks_workers and device != "accelerator"


def on_sim(body: Callable[..., Any], *args: Any, ranks: int = 1) -> list[Any]:
    """`run_ranks` on the simulated accelerator."""
    return run_ranks(ranks, body, *args, device="sim")


def is_simulated(device: str = "accelerator") -> bool:
    """Whether ranks on `device` have the simulated accelerator."""
    return device in _simulated


def _device(name: str) -> str:
    return "sim" if name in _simulated else name


def close_pools() -> None:
    """Stop every kept process."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)
