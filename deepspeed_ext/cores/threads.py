"""Sets the CPU masks of this process's threads and places the optimizer process.

Linux binds threads, not processes: setting the mask of a process id moves its main thread only, and
each later thread starts with the mask of its creator. So `confine` visits every thread, and repeats
until a pass changes nothing.

The optimizer process sets its own CPUs and threads before it imports torch, from a
`WorkerPlacement` that its parent sends. So the parent moves none of its own threads, and no numactl
binary is needed.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext import cores as masks
from deepspeed_ext.cores.plan import RankPlan, split_cores, usable_cores, within_quota
from deepspeed_ext.cores.topology import (
    OMP_BINDING_VARIABLES,
    find_allowed,
    read_topology,
    thread_masks,
)
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.proc import format_cpulist, read_cpu_quota_cores

__all__ = [
    "WorkerPlacement",
    "confine",
    "outside",
    "own_masks",
    "restore",
    "unbound_threads",
]

# Threads that start during a pass make another pass necessary; in practice two are enough.
MAX_PASSES = 20


def own_masks() -> dict[int, frozenset[int]]:
    """Return the mask of each thread of this process, by its id, as the kernel reports them."""
    return thread_masks(Path("/proc/self"))


def outside(cpus: Collection[int]) -> dict[int, frozenset[int]]:
    """Return the threads of this process that may run on CPUs outside ``cpus``."""
    return {tid: mask for tid, mask in own_masks().items() if not mask <= frozenset(cpus)}


def confine(cpus: Collection[int]) -> None:
    """Confine every thread of this process to ``cpus``.

    A thread that is already bound to some of ``cpus`` keeps its mask. NCCL's threads, whose masks
    differ from the main thread's, are moved too.

    Args:
        cpus: CPU numbers, at least one.

    Raises:
        OSError: the kernel refused or does not report the threads' masks, or a thread is still
            outside ``cpus``. All masks are restored.
    """
    target = frozenset(cpus)
    assert target, "an empty mask means every CPU to some interfaces"
    saved = own_masks()
    if not saved:
        raise OSError("cannot read the masks of this process's threads in /proc/self/task")
    try:
        for _ in range(MAX_PASSES):
            changed = False
            for tid, old in own_masks().items():
                new = old & target or target
                changed |= new != old and _set_mask(tid, new)
            if not changed:
                break
        if stray := outside(target):
            listing = ", ".join(f"{tid}: {format_cpulist(mask)}" for tid, mask in stray.items())
            raise OSError(
                f"these threads may still run outside CPUs {format_cpulist(target)}: {listing}"
            )
    except Exception:
        restore(saved)
        raise


def _set_mask(tid: int, cpus: frozenset[int]) -> bool:
    """Set a thread's mask; return False if the thread has ended."""
    try:
        os.sched_setaffinity(tid, cpus)
    except ProcessLookupError:
        return False
    return True


def restore(saved: Mapping[int, frozenset[int]]) -> None:
    """Restore every thread's saved mask; threads that started later get the main thread's.

    If the kernel refuses a mask, because its CPUs have left the cpuset, the thread keeps its
    present one.
    """
    default = saved.get(os.getpid()) or frozenset().union(*saved.values())
    for _ in range(MAX_PASSES):
        changed = False
        for tid, mask in own_masks().items():
            wanted = saved.get(tid, default)
            if mask != wanted:
                with suppress(OSError):
                    # The kernel reduces a mask to the cpuset. Do not count that as a change:
                    # repeating gains nothing.
                    changed |= _set_mask(tid, wanted) and os.sched_getaffinity(tid) == wanted
        if not changed:
            return


@dataclass(frozen=True)
class WorkerPlacement:
    """CPUs of a process that runs one thread per CPU. Its memory is where its threads touch it
    first."""

    cpus: frozenset[int]
    pin_each_thread: bool = False
    """Whether each thread is pinned to its own CPU: if the CPUs span several memory nodes, so that
    a thread stays near the pages that it touched first."""

    @classmethod
    def of(cls, plan: RankPlan) -> "WorkerPlacement":
        """Return the placement of a rank's optimizer process."""
        return cls(frozenset(plan.optimizer), "split" in plan.flags)

    @property
    def threads(self) -> int:
        """Number of threads: one per CPU."""
        return max(1, len(self.cpus))

    def environment(self) -> dict[str, str]:
        """Return environment variables that give later loaded OpenMP runtimes one thread per
        CPU."""
        threads = str(len(self.cpus))
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.pin_each_thread:
            variables |= {
                "OMP_PROC_BIND": "true",
                "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in sorted(self.cpus)),
            }
        return variables

    def bind_process(self) -> str | None:
        """Bind every thread of the calling process to this placement.

        OpenMP reads the environment when torch is imported. If a start-up hook of this Python did
        that already, its threads are still bound to the CPUs, but not to one each.

        Returns:
            A message for the parent to log if binding failed; else None. The thread count is set in
            either case.
        """
        for name in OMP_BINDING_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(self.environment())
        try:
            for tid in (0, *own_masks()):
                _set_mask(tid, self.cpus)
        except (OSError, AttributeError) as error:
            return f"cannot bind to CPUs {format_cpulist(self.cpus)}: {error}"
        got = frozenset(os.sched_getaffinity(0))
        if got != self.cpus:
            return f"asked for CPUs {format_cpulist(self.cpus)}, got {format_cpulist(got)}"
        return None


def unbound_threads(
    reserved: int | float | None,
    local_ranks: int,
    *,
    on_cpu: bool = False,
) -> int:
    """Return the number of threads for an unbound optimizer process: as many as a plan would give
    it cores, at least 1.

    Args:
        reserved: cores of the rank kept for PyTorch, a count or a fraction. None: not configured.
        local_ranks: number of ranks on this host, which share its cores evenly.
        on_cpu: the CPU is the accelerator.
    """
    sharers, quota = max(1, local_ranks), read_cpu_quota_cores()
    rank_cores = within_quota(
        max(1, _count_cores() // sharers), None if quota is None else quota / sharers
    )
    _, optimizer = split_cores(rank_cores, reserved, on_cpu=on_cpu)
    return optimizer


def _count_cores() -> int:
    """Count the physical cores that a plan could use; CPUs if the host does not describe its
    cores."""
    try:
        topology = read_topology()
        return len(usable_cores(topology, find_allowed(topology)[0]))
    except (ConfigError, UnsupportedError):
        return len(masks.initial_mask() or masks.present_mask()) or os.cpu_count() or 1
