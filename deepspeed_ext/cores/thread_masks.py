"""Reads, sets and restores the affinity masks of all threads of a process.

Linux binds threads, not processes: setting the mask of a process id moves its main thread only, and
each later thread starts with the mask of its creator. So `confine` visits every thread, and repeats
until a pass changes nothing.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from deepspeed_ext.cores.allowed import status_mask
from deepspeed_ext.runtime.cpulist import format_cpulist
from deepspeed_ext.runtime.procfs import numbered

__all__ = ["Masks", "confine", "outside", "restore", "thread_masks"]

Masks = Mapping[int, frozenset[int]]
"""Thread id -> CPUs that the thread may run on."""

# Threads that start during a pass make another pass necessary; in practice two are enough.
MAX_PASSES = 20


def thread_masks(pid: int | None = None) -> dict[int, frozenset[int]]:
    """Return the masks of all threads of a process (by default this one), as the kernel reports
    them."""
    tasks = numbered(Path(f"/proc/{pid or 'self'}/task"), "")
    return {tid: mask for tid, path in tasks if (mask := status_mask(path / "status"))}


def outside(cpus: Collection[int], pid: int | None = None) -> dict[int, frozenset[int]]:
    """Return the threads of a process (by default this one) that may run on CPUs outside
    ``cpus``."""
    return {tid: mask for tid, mask in thread_masks(pid).items() if not mask <= frozenset(cpus)}


def confine(cpus: Collection[int], *, one_each: bool = False) -> Masks:
    """Confine every thread of this process to ``cpus``, and return the previous masks for
    `restore`.

    A thread that is already bound to some of ``cpus`` keeps its mask. NCCL's threads, whose masks
    differ from the main thread's, are moved too.

    Args:
        cpus: CPU numbers, at least one.
        one_each: pin each thread to a single CPU, in turn; for isolated CPUs, where the kernel
            balances no load.

    Raises:
        OSError: the kernel refused, does not tell the threads' masks, or a thread is still outside
            ``cpus``. All masks are restored.
    """
    target = frozenset(cpus)
    assert target, "an empty mask means every CPU to some interfaces"
    saved = thread_masks()
    if not saved:
        raise OSError("cannot read the masks of this process's threads in /proc/self/task")
    try:
        for _ in range(MAX_PASSES):
            if not _confine_once(target, one_each):
                break
        if stray := outside(target):
            listing = ", ".join(f"{tid}: {format_cpulist(mask)}" for tid, mask in stray.items())
            raise OSError(
                f"these threads may still run outside CPUs {format_cpulist(target)}: {listing}"
            )
    except Exception:
        restore(saved)
        raise
    return saved


def _confine_once(target: frozenset[int], one_each: bool) -> bool:
    """Visit all threads once; return whether any mask changed."""
    changed = False
    ordered = sorted(target)
    for position, (tid, old) in enumerate(thread_masks().items()):
        new = frozenset({ordered[position % len(ordered)]}) if one_each else old & target or target
        if new != old:
            changed |= _set_mask(tid, new)
    return changed


def _set_mask(tid: int, cpus: frozenset[int]) -> bool:
    """Set a thread's mask; return False if the thread has ended."""
    try:
        os.sched_setaffinity(tid, cpus)
    except ProcessLookupError:
        return False
    return True


def restore(saved: Masks) -> None:
    """Restore every thread's saved mask; threads that started later get the main thread's.

    If the kernel refuses a mask, because its CPUs have left the cpuset, the thread keeps its
    present one.
    """
    default = saved.get(os.getpid()) or frozenset().union(*saved.values())
    for _ in range(MAX_PASSES):
        changed = False
        for tid, mask in thread_masks().items():
            wanted = saved.get(tid, default)
            if mask != wanted:
                try:
                    # The kernel reduces a mask to the cpuset. Do not count that as a change:
                    # repeating gains nothing.
                    changed |= _set_mask(tid, wanted) and os.sched_getaffinity(tid) == wanted
                except OSError:
                    continue
        if not changed:
            return
