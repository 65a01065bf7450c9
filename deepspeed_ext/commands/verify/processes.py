"""Starts the ranks of a check, limits their time, and ends all their processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from deepspeed_ext.commands.verify.rank import KILLED, PARENT
from deepspeed_ext.runtime.child_process import python_command

__all__ = ["PARENT", "START_RANK", "Ended", "Ranks"]

START_RANK = "deepspeed_ext.commands.verify.rank"
MARK = "DSEXT_VERIFY_MARK"
"""Variable in the environment of all processes that a rank starts."""
GRACE_SECONDS = 30.0
"""Time for the other ranks to end after one has failed."""
DEATH_SECONDS = 60.0
"""Time for all ranks to end after an optimizer process was killed."""
END_SECONDS = 10.0
"""Time for a killed process to end, on a busy machine."""
TAIL_CHARACTERS = 2000
WARNING = re.compile(r"\[WARNING\] \[deepspeed_ext\] (.*)")
"""A line of this package's logger."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of a phase ended.

    Attributes:
        statuses: exit status of each rank; None: it was killed.
        why: why the ranks were killed; empty if they were not.
        output: the last lines of a rank that failed.
        warnings: warnings of this package on any rank.
    """

    statuses: tuple[int | None, ...]
    why: str
    output: str
    warnings: tuple[str, ...] = ()


class Ranks:
    """The processes of one phase; a context manager that ends them and all processes that they have
    started.

    Args:
        phase: ``train`` or ``resume``.
        start: module whose `main` runs a rank.
    """

    def __init__(self, folder: Path, phase: str, count: int, start: str = START_RANK) -> None:
        self.folder, self.phase, self._mark = folder, phase, uuid.uuid4().hex
        self._logs = [folder / f"{phase}-{rank}.log" for rank in range(count)]
        self._processes: list[Any] = []
        try:
            for rank, path in enumerate(self._logs):
                with path.open("wb") as log:
                    self._processes.append(
                        self._process(start, self._environment(rank, count), log)
                    )
        except BaseException:
            self.close()
            raise

    def _process(self, start: str, environment: dict[str, str], log: BinaryIO) -> Any:
        """Start a rank, with `log` as its output."""
        return subprocess.Popen(
            python_command(start, str(self.folder), self.phase),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _environment(self, rank: int, count: int) -> dict[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MASTER_ADDR", "MASTER_PORT")
        }
        environment.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
        environment.update(
            dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(count))
        )
        environment.setdefault(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count))
        )
        return environment | {PARENT: str(os.getpid()), MARK: self._mark, "DSEXT_LOG_LEVEL": "INFO"}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks and all processes that they have started."""
        started = self._alive()
        for pid in [
            *(process.pid for process in self._processes if process.poll() is None),
            *started,
        ]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            # stuck in an uninterruptible call: it dies afterwards
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while set(started) & set(self._alive()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _alive(self) -> list[int]:
        """All processes that carry the mark, including optimizer processes, which have their own
        sessions."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        return found

    def wait(self, limit_seconds: float, leave: Callable[[], None]) -> Ended:
        """Wait until all ranks have ended, or have taken too long, or `leave` raises."""
        begin = time.monotonic()
        limits = {begin + limit_seconds: f"the ranks had not ended after {limit_seconds:.0f} s"}
        failed = killed = False
        while None in (statuses := [process.poll() for process in self._processes]):
            leave()
            now = time.monotonic()
            if not failed and any(statuses):
                failed = True
                limits[now + GRACE_SECONDS] = (
                    f"the other ranks had not ended {GRACE_SECONDS:.0f} s after one failed"
                )
            if not killed and (self.folder / KILLED).exists() and self.phase == "train":
                killed = True
                limits[now + DEATH_SECONDS] = (
                    f"the ranks had not ended {DEATH_SECONDS:.0f} s after a worker's death"
                )
            if over := [why for limit, why in limits.items() if now > limit]:
                return Ended(tuple(statuses), over[0], self._output(statuses), self._warnings())
            time.sleep(0.05)
        return Ended(tuple(statuses), "", self._output(statuses), self._warnings())

    def _warnings(self) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for log in self._logs:
            with suppress(OSError):
                found |= dict.fromkeys(WARNING.findall(log.read_text(errors="replace")))
        return tuple(found)

    def _output(self, statuses: list[int | None]) -> str:
        wrong = next((rank for rank, status in enumerate(statuses) if status), None)
        wrong = next((rank for rank, status in enumerate(statuses) if status is None), wrong)
        if wrong is None:
            return ""
        with suppress(OSError):
            return (
                f"rank {wrong}: "
                f"{self._logs[wrong].read_text(errors='replace')[-TAIL_CHARACTERS:].strip()}"
            )
        return ""
