"""What the kernel says of a process's threads: where each may run, how often it was moved or put
aside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from deepspeed_ext.cores.threads import thread_masks
from deepspeed_ext.runtime.cpulist import format_cpulist


@dataclass(frozen=True)
class Counts:
    """Since a thread was started, or between two readings.

    Attributes:
        involuntary: switches to another thread while it could have gone on.
        migrations: moves to another CPU.
        queued_ms: time in which it could have run, but another thread had its CPU.
        run_ms: time on a CPU.
    """

    involuntary: float = 0.0
    migrations: float = 0.0
    queued_ms: float = 0.0
    run_ms: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def each(self, steps: int) -> Counts:
        """The share of one step."""
        return Counts(*(value / steps for value in astuple(self)))


Reading = dict[tuple[int, int], Counts]
"""(process id, thread id) -> counts."""


def read(pids: Iterable[int]) -> Reading:
    """The counts of every thread of these processes."""
    found: Reading = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                found[pid, int(task.name)] = _counts(task)
            except (FileNotFoundError, ProcessLookupError):  # it has ended since
                continue
    return found


def between(before: Reading, after: Reading) -> Counts:
    """What happened to all threads together between two readings; threads that ended are left
    out."""
    return sum(
        (counts - before.get(thread, Counts()) for thread, counts in after.items()), Counts()
    )


def _counts(task: Path) -> Counts:
    run, queued, _ = map(int, (task / "schedstat").read_text().split())
    status, sched = (task / "status").read_text(), _text(task / "sched")
    return Counts(
        involuntary=_number(r"^nonvoluntary_ctxt_switches:\s+(\d+)", status),
        migrations=_number(r"^se\.nr_migrations\s*:\s+(\d+)", sched),
        queued_ms=queued / 1e6,
        run_ms=run / 1e6,
    )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _number(pattern: str, text: str) -> float:
    """The number that the pattern finds; NaN where this kernel does not tell it."""
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def by_mask(pid: int) -> dict[str, int]:
    """How many threads of a process have each mask."""
    return dict(
        sorted(Counter(format_cpulist(mask) for mask in thread_masks(pid).values()).items())
    )


def mask_text(masks: dict[str, int]) -> str:
    """``{"0": 2, "0-1": 5}`` as "2 on 0; 5 on 0-1"."""
    return "; ".join(f"{count} on {cpus}" for cpus, count in masks.items())
