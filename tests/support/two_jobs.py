"""Two jobs that save into one folder, one file operation at a time and in any order, and what may
not happen then.

Each job is a thread that stops before every file operation until it has its turn. Both look to each
other like jobs of other hosts: neither sees whether the other lives.
"""

from __future__ import annotations

import builtins
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deepspeed_ext.adapter import async_checkpoint_engine as async_engine
from deepspeed_ext.adapter.async_checkpoint_engine import AsyncCheckpointEngine
from deepspeed_ext.checkpoint import folder as checkpoint_folder
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.worker.main import write_from_arena
from deepspeed_ext.zenflow.worker.messages import ArenaWrite
from tests.support.crash.driver import MODES, Disks, InProcess, commit_save, load, make_engine, save

__all__ = ["Duel", "Job", "LateWriter", "hooked", "operations_of", "problem_of", "random_turns"]

ALONE = RankGroup(None, 0, 1, torch.device("cpu"))
SECONDS = 60
OPERATIONS = (
    "rename",
    "replace",
    "mkdir",
    "open",
    "unlink",
    "rmdir",
    "listdir",
    "scandir",
    "stat",
    "lstat",
    "fsync",
)
"""Functions of `os` before which a job stops."""
_here = threading.local()


@dataclass(frozen=True)
class Duel:
    """Two saves.

    Attributes:
        modes: how each job saves; see `MODES`.
        tags: under which each job saves.
        is_quiet: whether each job takes what the other has written for an hour old.
    """

    modes: tuple[str, str]
    tags: tuple[str, str]
    is_quiet: bool = False


class Job:
    """A save in a thread of its own.

    Attributes:
        value: what it saves.
        outcome: "saved", or the text of its error; None: it goes on.
        operations: file operations so far.
    """

    def __init__(self, folder: Path, tag: str, mode: str, value: int) -> None:
        self.value, self.outcome, self.operations = value, None, 0
        self._turn, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(folder, tag, mode), daemon=True)
        self._thread.start()
        self._await_stop()

    outcome: str | None

    def _run(self, folder: Path, tag: str, mode: str) -> None:
        _here.job = self
        try:
            self.stop()
            self.outcome = _save_late(folder, tag, mode, self.value)
        except CheckpointError as error:
            self.outcome = str(error)
        except BaseException as error:
            self.outcome = f"broken: {type(error).__name__}: {error}"
        finally:
            self._stopped.release()

    def stop(self) -> None:
        """Wait for the next turn; called by the job's thread."""
        self.operations += 1
        self._stopped.release()
        if not self._turn.acquire(timeout=SECONDS):
            raise TimeoutError("the job got no turn")

    def advance(self, operations: int | None = None) -> None:
        """Let it make so many operations; None: all that are left."""
        while self.outcome is None and operations != 0:
            self._turn.release()
            self._await_stop()
            operations = None if operations is None else operations - 1

    def _await_stop(self) -> None:
        assert self._stopped.acquire(timeout=SECONDS), "the job hangs"


class LateWorker(InProcess):
    """Writes only once somebody waits for it, into whatever then has the file's name."""

    def __init__(self, link: InProcess) -> None:
        super().__init__(link.arena)
        self._waiting: list[list[ArenaWrite]] = []

    def submit(self, tasks: list[ArenaWrite]) -> int:
        self._waiting.append(tasks)
        return len(self._waiting) - 1

    def wait_for(self, number: int, timeout_seconds: float | None = None) -> None:
        for tasks in self._waiting[len(self._failed) : number + 1]:
            self._failed += [write_from_arena(task, self.arena) for task in tasks]


class LateWriter:
    """Stands for the thread: it writes only once somebody waits for it, or at once.

    Attributes:
        is_late: whether it writes late.
    """

    is_late = True

    def submit(self, job: Callable[..., None], *args: Any) -> Future[None]:
        future = LateFuture(job, args)
        if not self.is_late:
            future.exception()
        return future

    def end(self) -> None:
        """Nothing has to end."""


class LateFuture(Future[None]):
    """Runs when its result is asked for."""

    def __init__(self, job: Callable[..., None], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._job, self._args = job, args

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            try:
                self._job(*self._args)
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(None)
        return super().exception(timeout)


def _save_late(folder: Path, tag: str, mode: str, value: int) -> str:
    engine, state = make_engine(ALONE, True, mode)
    if isinstance(engine, AsyncCheckpointEngine):
        late: Any = LateWorker(engine._link)  # type: ignore[arg-type]
        engine._link = late
    commit_save(engine, state.fill_(value), ALONE, Disks(folder, False), tag)
    if isinstance(engine, AsyncCheckpointEngine):
        engine.finish() if mode == MODES[1] else engine.finish_alone()
    return "saved"


class Forgetful(set[str]):
    """Holds what is put into it, and denies it."""

    def __contains__(self, item: object) -> bool:
        return False


def _stopping(function: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        if (job := getattr(_here, "job", None)) is not None:
            job.stop()
        return function(*args, **kwargs)

    return stopping


@contextmanager
def hooked(is_quiet: bool) -> Iterator[None]:
    """Let the jobs stop before every operation. `is_quiet`: see `Duel`."""
    places = [(os, name) for name in OPERATIONS] + [(builtins, "open"), (torch, "save")]
    with (
        patch.object(async_engine, "Writer", LateWriter),
        # `make_engine` changes it
        patch.object(async_engine, "_SILENCE_SECONDS", async_engine._SILENCE_SECONDS),
        patch.object(checkpoint_folder, "_in_use", Forgetful()),
        patch.object(checkpoint_folder, "_QUIET_SECONDS", -1.0 if is_quiet else 3600.0),
    ):
        originals = [(place, name, getattr(place, name)) for place, name in places]
        for place, name, function in originals:
            setattr(place, name, _stopping(function))
        try:
            yield
        finally:
            for place, name, function in originals:
                setattr(place, name, function)


def operations_of(duel: Duel, folder: Path) -> tuple[int, int]:
    """How many file operations each job makes if they save one after the other."""
    with hooked(duel.is_quiet):
        jobs = [Job(folder, tag, mode, 9) for tag, mode in zip(duel.tags, duel.modes, strict=True)]
        for job in jobs:
            job.advance()
    shutil.rmtree(folder)
    return jobs[0].operations, jobs[1].operations


def problem_of(duel: Duel, folder: Path, turns: Iterable[tuple[int, int | None]]) -> str | None:
    """Let two jobs save 2 and 3 over a checkpoint "a" that holds 1.

    Args:
        duel: the saves.
        folder: an empty or new folder.
        turns: which job makes how many operations; both end after the last turn.

    Returns:
        What is wrong; None: nothing.
    """
    save(ALONE, Disks(folder, False), "a", 1)
    told: list[str] = []
    with hooked(duel.is_quiet):
        jobs = [
            Job(folder, tag, mode, value)
            for tag, mode, value in zip(duel.tags, duel.modes, (2, 3), strict=True)
        ]
        for number, operations in (*turns, (0, None), (1, None)):
            jobs[number].advance(operations)
            if (problem := _damage(folder)) is not None:
                told.append(
                    "when the jobs had made "
                    f"{[job.operations for job in jobs]} operations: {problem}"
                )
    told += [
        f"a job ended so: {job.outcome}" for job in jobs if str(job.outcome).startswith("broken")
    ]
    told += _broken_promises(duel, folder, jobs)
    return "; ".join(told) or None


def _damage(folder: Path) -> str | None:
    """What is wrong with what would be there if both jobs were killed now."""
    crashed = folder.parent / "crashed"
    shutil.rmtree(crashed, ignore_errors=True)
    shutil.copytree(folder, crashed)
    try:
        found = load(ALONE, Disks(crashed, False))
    except Exception as error:
        return f"cannot be loaded: {type(error).__name__}: {error}"
    return None if found in ({1}, {2}, {3}) else f"a mixture: {found}"


def _broken_promises(duel: Duel, folder: Path, jobs: list[Job]) -> Iterator[str]:
    """Jobs that were told that they have saved, and whose save neither is there nor was replaced by
    a later one."""
    there = {}
    for tag in set(duel.tags):
        with suppress(CheckpointError):
            there[tag] = load(ALONE, Disks(folder, False), tag)
    for job, tag in zip(jobs, duel.tags, strict=True):
        allowed = [
            {other.value}
            for other, of in zip(jobs, duel.tags, strict=True)
            if of == tag and other.outcome == "saved"
        ]
        if job.outcome == "saved" and there.get(tag) not in allowed:
            yield f"job {job.value} was told 'saved', but {tag!r} holds {there.get(tag)}"
    if not any(job.outcome == "saved" for job in jobs):
        yield f"no job could save: {[job.outcome for job in jobs]}"
    left = [path.name for path in folder.rglob("*.dsext-*")]
    if left and not duel.is_quiet:
        yield f"left behind: {left}"


def random_turns(draw: random.Random, operations: tuple[int, int]) -> list[tuple[int, int]]:
    """Turns of random lengths, short and long, until about all operations are made."""
    longest = draw.choice((3, 10, 40))
    count = 2 * sum(operations) // (1 + longest)
    return [(draw.randrange(2), draw.randint(1, longest)) for _ in range(count)]
