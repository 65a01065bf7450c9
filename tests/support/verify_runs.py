"""Checks of `deepspeed_ext.commands.verify` whose ranks are forked: they start in a tenth of a
second, not in ten."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from deepspeed_ext.commands.verify import processes
from tests.support import ranks, verify_faults
from tests.support.rank_nursery import Nursery

__all__ = ["ForkedRanks", "left_behind", "nursery", "shared_segments"]

RANK = verify_faults.__name__


def nursery() -> Nursery:
    """The process that forks ranks. It ends with the thread that asks for it first."""
    forks = ranks.nursery()
    forks.load(
        "deepspeed_ext.commands.verify.rank",
        "deepspeed_ext.commands.verify.reference",
        "deepspeed_ext.commands.verify.model",
        RANK,
    )
    return forks


class ForkedRanks(processes.Ranks):
    """Ranks of which `start` is not code, but the fault of `verify_faults.Faulty`, as JSON."""

    def _process(self, start: str, environment: dict[str, str], log: BinaryIO) -> Any:
        environment = {**environment, "OMP_NUM_THREADS": "1"}
        return nursery().start_script(
            RANK, [str(self.folder), self.phase, start], environment, log, log
        )


def left_behind(checker: int | None = None) -> list[int]:
    """Everything that checks of process `checker` (None: this one) have started and that is still
    there."""
    found: list[int] = []
    checker = checker or os.getpid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get(processes.PARENT) == str(checker)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
    return found


def shared_segments() -> set[str]:
    """Names in /dev/shm, without semaphores that Python's multiprocessing, here or in another test,
    unlinks at once."""
    with suppress(FileNotFoundError):
        return {
            path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")
        }
    return set()
