"""Reads what Linux says of this process and its host: files under /proc and /sys, lists of CPUs,
limits of control groups (cgroups, versions 1 and 2), and memory. Tests supply their own directory
tree.

A file that cannot be read counts as absent: containers and broken firmware leave many of them out.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_CPU_ID = (1 << 16) - 1
"""Linux supports at most 8192 CPUs. The bound keeps a typing error such as 0-4000000000 from
filling the memory."""
_ITEM = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_text(path: Path) -> str | None:
    """The stripped content of a file, in replacement characters where it is not UTF-8; None if it
    cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # some sysfs files fail with EIO
        return None


def read_int(path: Path) -> int | None:
    """Read a whole number from ``path``; None if there is none."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def read_cpus(path: Path) -> frozenset[int] | None:
    """Read a CPU list from ``path``; None if there is none."""
    try:
        return parse_cpulist(read_text(path) or "") or None
    except ValueError:
        return None


def numbered(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Number and path of each entry ``<prefix><number>``, by number."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    numbers = ((name.removeprefix(prefix), name) for name in names if name.startswith(prefix))
    yield from sorted((int(text), directory / name) for text, name in numbers if text.isdecimal())


def host_id(root: Path | str = "/") -> str:
    """A text that the processes of one host share: the kernel's boot id, or the host's name."""
    return read_text(Path(root, "proc/sys/kernel/random/boot_id")) or socket.gethostname()


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list such as ``0,4-11``. Empty text is the empty set, as in the kernel's own
    files.

    Raises:
        ValueError: the text is not a CPU list; the message quotes the wrong item.
    """
    cpus: set[int] = set()
    text = text.strip()
    for item in text.split(",") if text else ():
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(
                f"{item[:40]!r} is not a CPU number or range (write for example 0,4-11)"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {item!r} runs backwards; write the lower CPU first")
        if last > MAX_CPU_ID:
            raise ValueError(
                f"CPU {last} in {item!r} is beyond the highest supported number {MAX_CPU_ID}"
            )
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """Return the shortest list that `parse_cpulist` reads back as ``cpus``, such as ``0,4-11``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class CpuQuota:
    """A limit on the CPU time, in seconds per second, of a control group and all those below it."""

    group: str
    cores: float


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's directory for ``controller`` and then its parents; some may not exist.

    In a container without a cgroup namespace, /proc/self/cgroup shows the host's path, but only the
    container's own subtree is mounted. The walk then ends at the mount's root, which is the
    container's own group.
    """
    mounts = root / "sys/fs/cgroup"
    lines = (read_text(root / "proc/self/cgroup") or f"::/\n:{controller}:/").splitlines()
    for _, controllers, group in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if controllers == "":  # version 2
            tops = [mounts / "unified", mounts]
        elif controller in controllers.split(","):
            folders = sorted(mounts.iterdir()) if mounts.is_dir() else []
            tops = [top for top in folders if controller in top.name.split(",")]
        else:
            continue
        parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])


def _identify(group: Path) -> str:
    """Identify a group on its host by its inode, which is the same in all namespaces and mounts;
    its path is not."""
    try:
        return str(group.stat().st_ino)
    except OSError:  # the group has just been removed
        return str(group)


def read_cpu_quotas(root: Path | str = "/") -> tuple[CpuQuota, ...]:
    """Every CPU quota from this process's group up to the root; other processes may share it."""
    quotas: dict[str, float] = {}
    for group in own_groups(Path(root), "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        text = read_text(group / "cpu.max") or " ".join(
            read_text(group / name) or "" for name in names
        )
        fields = text.split()
        if len(fields) == 2 and all(field.isdecimal() and int(field) for field in fields):
            quotas[_identify(group)] = int(fields[0]) / int(fields[1])
    return tuple(CpuQuota(group, cores) for group, cores in quotas.items())


def read_cpu_quota_cores(root: Path | str = "/") -> float | None:
    """The tightest of `read_cpu_quotas`, in cores."""
    return min((quota.cores for quota in read_cpu_quotas(root)), default=None)


def total_host_bytes(root: Path = Path("/")) -> int:
    """The bytes of host memory that this process could use if nothing else ran."""
    limits = (limit for _, limit, _ in _memory_limits(root))
    return min([_memory_info(root, "MemTotal"), *limits])


def available_host_bytes(root: Path = Path("/")) -> int:
    """The bytes of host memory that this process can allocate without swapping and within its
    control groups."""
    return max(0, min(available_by_limit(root).values()))


def available_by_limit(root: Path = Path("/")) -> dict[str, int]:
    """The bytes still available on the ``machine``, and under the limit of each of this process's
    control groups, by a text that is equal in processes that share the limit."""
    available = {"machine": _memory_info(root, "MemAvailable")}
    for group, limit, use in _memory_limits(root):
        lines = (read_text(group / "memory.stat") or "").splitlines()
        fields = dict(line.partition(" ")[::2] for line in lines)
        # page cache that the kernel drops before it refuses an allocation
        cache = int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
        available[_identify(group)] = limit - use + min(use, cache)
    return available


def _memory_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each group with a limit, the limit and the use, in bytes, from this process's own group
    to the root. Version 1 writes "no limit" as a number beyond any memory."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for group in own_groups(root, "memory"):
        for limit, use in (
            (read_int(group / limit), read_int(group / use)) for limit, use in names
        ):
            if limit is not None and use is not None:
                yield group, limit, use


def _memory_info(root: Path, name: str) -> int:
    """A line of /proc/meminfo in bytes; psutil's number on a system without it."""
    text = read_text(root / "proc/meminfo") or ""
    if found := re.search(rf"^{name}: +(\d+) kB$", text, re.M):
        return int(found[1]) << 10
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total if name == "MemTotal" else memory.available)
