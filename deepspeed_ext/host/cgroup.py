"""Limits that control groups put on this process, read from a tree that tests can supply; versions 1 and 2.

A cpuset says which CPUs, a quota says how much CPU time: they are kept apart.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from deepspeed_ext.host.procfs import positive, read_cpus, read_int, read_text

__all__ = [
    "own_groups",
    "read_cgroup_id",
    "read_cpu_quota_cores",
    "read_cpuset",
    "read_memory_limit_bytes",
    "read_throttled_count",
]

# Groups are nested in each other a few deep; a path of thousands would be walked for minutes.
_MAX_DEPTH = 128


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's directory for ``controller`` and all its parents, version 1 then version 2; some may not exist.

    A container without a cgroup namespace sees the host's path in /proc/self/cgroup but only its own subtree
    mounted: the walk up then ends at the mount's root, which is the container's own group.
    """
    mounts = root / "sys/fs/cgroup"
    for controllers, group in _memberships(root) or [("", "/"), (controller, "/")]:
        if controllers == "":
            tops = [mounts / "unified", mounts]
        elif controller in controllers.split(","):
            tops = [top for top in _entries(mounts) if controller in top.name.split(",")]
        else:
            continue
        parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")][:_MAX_DEPTH]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _memberships(root: Path) -> list[tuple[str, str]]:
    """(controllers, path of the group) for each line of /proc/self/cgroup; version 2 names no controllers."""
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    fields = (line.split(":", 2) for line in lines)
    return [(field[1], field[2]) for field in fields if len(field) == 3]


def _entries(directory: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(directory.iterdir())
    return []


def read_cpu_quota_cores(root: Path | str = "/") -> float | None:
    """The tightest CPU quota from this process's group up to the root, in cores; None without a quota."""
    quotas = []
    for group in own_groups(Path(root), "cpu"):
        fields = (read_text(group / "cpu.max") or "").split()
        if len(fields) == 2:
            quota, period = (positive(field) for field in fields)
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
            if key == "nr_throttled":
                return positive(value)
    return 0


def read_cgroup_id(root: Path | str = "/") -> str:
    """Equal for two processes of one host exactly where they share a quota: path of the group, namespace included."""
    namespace = Path(root, "proc/self/ns/cgroup")
    try:
        inside = str(namespace.readlink())
    except OSError:
        inside = ""
    paths = {group for names, group in _memberships(Path(root)) if names == "" or names.startswith("cpu")}
    return "|".join([inside, *sorted(paths)])
