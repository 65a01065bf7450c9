"""Limits that control groups put on this process, read from a tree that tests can supply; versions 1 and 2.

A cpuset says which CPUs, a quota says how much CPU time: they are kept apart.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from deepspeed_ext.affinity.tree import read_cpus, read_int, read_text

__all__ = [
    "own_groups",
    "read_cgroup_id",
    "read_cpu_quota_cores",
    "read_cpuset",
    "read_memory_limit_bytes",
    "read_throttled_count",
]


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's directory for ``controller`` and all its parents, version 1 then version 2; some may not exist.

    A container without a cgroup namespace sees the host's path in /proc/self/cgroup but only its own subtree
    mounted: the walk up then ends at the mount's root, which is the container's own group.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or f"0::/\n1:{controller}:/").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        if fields[1] == "":
            tops = [mounts / "unified", mounts]
        elif controller in fields[1].split(","):
            tops = [top for top in _entries(mounts) if controller in top.name.split(",")]
        else:
            continue
        parts = [part for part in PurePosixPath(fields[2]).parts if part not in ("/", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def read_cpu_quota_cores(root: Path | str = "/") -> float | None:
    """The tightest CPU quota from this process's group up to the root, in cores; None without a quota."""
    quotas = []
    for group in own_groups(Path(root), "cpu"):
        fields = (read_text(group / "cpu.max") or "").split()
        if len(fields) == 2:
            quota, period = (int(field) if field.isdecimal() else 0 for field in fields)
        else:
            quota = read_int(group / "cpu.cfs_quota_us") or 0
            period = read_int(group / "cpu.cfs_period_us") or 0
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def read_cpuset(root: Path | str = "/") -> frozenset[int] | None:
    """CPUs of this process's cpuset, the nearest group that states one; None without."""
    for group in own_groups(Path(root), "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpus = read_cpus(group, name)
            if cpus:
                return cpus
    return None


def read_memory_limit_bytes(root: Path | str = "/") -> int | None:
    """The tightest memory limit from this process's group up to the root; None without a limit."""
    limits = []
    for group in own_groups(Path(root), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_int(group / name)
            # Version 1 writes "no limit" as the largest page-aligned signed number.
            if limit is not None and limit < 1 << 62:
                limits.append(limit)
    return min(limits, default=None)


def read_throttled_count(root: Path | str = "/") -> int:
    """How often this process's group has been stopped for using up its quota."""
    for group in own_groups(Path(root), "cpu"):
        for line in (read_text(group / "cpu.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == "nr_throttled" and value.isdecimal():
                return int(value)
    return 0


def read_cgroup_id(root: Path | str = "/") -> str:
    """Equal for two processes of one host exactly where they share a quota: path of the group, namespace included."""
    namespace = Path(root, "proc/self/ns/cgroup")
    try:
        inside = str(namespace.readlink())
    except OSError:
        inside = ""
    lines = (read_text(Path(root, "proc/self/cgroup")) or "").splitlines()
    paths = [line.split(":", 2)[2] for line in lines if line.startswith("0::") or ":cpu" in line]
    return "|".join([inside, *sorted(set(paths))])
