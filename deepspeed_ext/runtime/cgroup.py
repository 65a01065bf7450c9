"""Limits of this process's control groups (cgroups), versions 1 and 2. Tests supply their own
directory tree.

A cpuset limits which CPUs may run the process; a quota limits its CPU time. They are read
separately.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deepspeed_ext.runtime.procfs import positive, read_cpus, read_int, read_text

__all__ = [
    "CpuQuota",
    "identify",
    "own_groups",
    "read_cpu_quota_cores",
    "read_cpu_quotas",
    "read_cpuset",
    "read_memory_limit_bytes",
    "read_throttled_count",
]

# Real groups are nested a few levels deep; walking
# a path of thousands of levels would take minutes.
_MAX_DEPTH = 128


@dataclass(frozen=True)
class CpuQuota:
    """A limit on the CPU time of a control group, shared by all groups below it."""

    group: str
    """Identifies the group on its host."""
    cores: float
    """CPU seconds per second."""


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's directory for ``controller`` and then its parents; some may not exist.

    In a container without a cgroup namespace, /proc/self/cgroup shows the host's path, but only the
    container's own subtree is mounted. The walk then ends at the mount's root, which is the
    container's own group.
    """
    mounts = root / "sys/fs/cgroup"
    for controllers, group in _memberships(root) or [("", "/"), (controller, "/")]:
        if controllers == "":
            tops = [mounts / "unified", mounts]
        elif controller in controllers.split(","):
            tops = [top for top in _entries(mounts) if controller in top.name.split(",")]
        else:
            continue
        parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")][
            :_MAX_DEPTH
        ]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _memberships(root: Path) -> list[tuple[str, str]]:
    """Return (controllers, group path) for each line of /proc/self/cgroup; controllers is "" for
    version 2."""
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    fields = (line.split(":", 2) for line in lines)
    return [(field[1], field[2]) for field in fields if len(field) == 3]


def _entries(directory: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(directory.iterdir())
    return []


def read_cpu_quotas(root: Path | str = "/") -> tuple[CpuQuota, ...]:
    """Return every CPU quota from this process's group up to the root; other processes may share
    any of them."""
    quotas: dict[str, float] = {}
    for group in own_groups(Path(root), "cpu"):
        fields = (read_text(group / "cpu.max") or "").split()
        if len(fields) == 2:
            quota, period = (positive(field) for field in fields)
        else:
            quota = read_int(group / "cpu.cfs_quota_us") or 0
            period = read_int(group / "cpu.cfs_period_us") or 0
        if quota > 0 and period > 0:
            quotas[identify(group)] = quota / period
    return tuple(CpuQuota(group, cores) for group, cores in quotas.items())


def identify(group: Path) -> str:
    """Identify a group on its host by its inode, which is the same in all namespaces and mounts;
    its path is not."""
    try:
        return str(group.stat().st_ino)
    except OSError:  # the group has just been removed
        return str(group)


def read_cpu_quota_cores(root: Path | str = "/") -> float | None:
    """Return the tightest CPU quota from this process's group up to the root, in cores; None if
    there is no quota."""
    return min((quota.cores for quota in read_cpu_quotas(root)), default=None)


def read_cpuset(root: Path | str = "/") -> frozenset[int] | None:
    """Return the CPUs of the nearest group with a cpuset; None if no group has one."""
    for group in own_groups(Path(root), "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpus = read_cpus(group, name)
            if cpus:
                return cpus
    return None


def read_memory_limit_bytes(root: Path | str = "/") -> int | None:
    """Return the tightest memory limit from this process's group up to the root, in bytes; None if
    there is none."""
    limits = []
    for group in own_groups(Path(root), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_int(group / name)
            # Version 1 writes "no limit" as the largest page-aligned signed number.
            if limit is not None and limit < 1 << 62:
                limits.append(limit)
    return min(limits, default=None)


def read_throttled_count(root: Path | str = "/") -> int:
    """Return how often the kernel has throttled this process's group for exceeding its CPU
    quota."""
    for group in own_groups(Path(root), "cpu"):
        for line in (read_text(group / "cpu.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == "nr_throttled":
                return positive(value)
    return 0
