"""Reads what Linux says of this process and its host: files under /proc and /sys, lists of CPUs,
limits of control groups (cgroups, versions 1 and 2), and memory. Tests supply their own directory
tree.

A file counts as absent if it is not a regular file (a FIFO, a device, a directory), is too long, or
cannot be read. Opening a FIFO would wait for a writer, and a device may be endless, so neither is
ever read.
"""

import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

__all__ = [
    "CpuQuota",
    "MAX_CPU_ID",
    "available_by_limit",
    "available_host_bytes",
    "format_cpulist",
    "host_id",
    "identify",
    "numbered",
    "own_groups",
    "parse_cpulist",
    "parse_whole",
    "positive",
    "read_cpu_quota_cores",
    "read_cpu_quotas",
    "read_cpus",
    "read_cpuset",
    "read_int",
    "read_memory_limit_bytes",
    "read_text",
    "total_host_bytes",
]

Value = TypeVar("Value")

# Kernel files that list something for each of thousands of CPUs have a few pages.
LIMIT_BYTES = 64 << 10
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
)
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")  # 64 bits have at most 20 digits
_NUMBER_IN_NAME = re.compile(r"[0-9]{1,9}")


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str | None:
    """Return the stripped content of a regular file; None if it is absent, unreadable, too long or
    not regular.

    Some sysfs files fail with EIO; they count as unreadable. Bytes that are not UTF-8 become
    replacement characters.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError):  # ValueError: the path contains a null byte
        return None
    try:
        content = (
            _read(descriptor, limit_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
        )
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if content is None else content.decode(errors="replace").strip()


def host_id(root: Path | str = "/") -> str:
    """Return a text that the processes of one host share: the kernel's boot id, or the host's name.

    Args:
        root: folder that holds ``proc``.
    """
    return read_text(Path(root, "proc/sys/kernel/random/boot_id")) or socket.gethostname()


def _read(descriptor: int, limit_bytes: int) -> bytes | None:
    """Read to the end of the file; None if that exceeds `limit_bytes`. procfs returns one page per
    read."""
    content = b""
    while part := os.read(descriptor, limit_bytes + 1 - len(content)):
        content += part
        if len(content) > limit_bytes:
            return None
    return content


def parse_whole(text: str) -> int:
    """Parse a whole number of at most 20 digits.

    Raises:
        ValueError: `text` is not such a number.
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not a whole number of at most 20 digits")
    return int(text)


def positive(text: str) -> int:
    """Parse a number; 0 if `text` is negative or anything else, such as ``max``."""
    try:
        return max(0, parse_whole(text))
    except ValueError:
        return 0


def _parsed(path: Path, parse: Callable[[str], Value]) -> Value | None:
    text = read_text(path)
    if not text:
        return None
    try:
        return parse(text)
    except ValueError:
        return None


def read_int(path: Path) -> int | None:
    """Read a whole number from ``path``; None if there is none."""
    return _parsed(path, parse_whole)


def read_cpus(path: Path) -> frozenset[int] | None:
    """Read a CPU list from ``path``; None if there is none."""
    return _parsed(path, parse_cpulist)


def numbered(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield (number, path) of each entry ``<prefix><number>``, by number; nothing if ``directory``
    cannot be listed."""
    try:
        names = os.listdir(directory)
    except (OSError, ValueError):
        return
    numbers = ((name.removeprefix(prefix), name) for name in names if name.startswith(prefix))
    yield from sorted(
        (int(digits), directory / name)
        for digits, name in numbers
        if _NUMBER_IN_NAME.fullmatch(digits)
    )


# Linux supports at most 8192 CPUs. The bound keeps a typing
# error such as 0-4000000000 from filling the memory.
MAX_CPU_ID = (1 << 16) - 1

# Without a limit, a file of 64 KiB could name every CPU thousands of times.
_MAX_NAMED = 16 * (MAX_CPU_ID + 1)
_NUMBER = "([0-9]{1,9})"
_ITEM = re.compile(f"{_NUMBER}(?:-{_NUMBER}(?::{_NUMBER}(?:/{_NUMBER})?)?)?")


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list such as ``0,4-11``, ``0-31:2/8`` (kernel: 2 of every 8) or ``0-31:2``
    (taskset: every second).

    Empty text is the empty set, as in the kernel's own files.

    Raises:
        ValueError: the text is not a CPU list; the message quotes the wrong item.
    """
    cpus: set[int] = set()
    named = 0
    text = text.strip()
    for item in text.split(",") if text else ():
        span, used, group = _parse_item(item.strip())
        named += len(span)
        if named > _MAX_NAMED:
            raise ValueError(
                f"the CPU list names more than {_MAX_NAMED} CPUs, "
                "counting repetitions; name each CPU once"
            )
        cpus.update(
            span if used == group else (cpu for cpu in span if (cpu - span.start) % group < used)
        )
    return frozenset(cpus)


def _parse_item(item: str) -> tuple[range, int, int]:
    """Return (the item's whole range, CPUs used per group, CPUs per group)."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"{item[:40]!r} is not a CPU number or range (write for example 0,4-11)")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ValueError(f"the range {item!r} runs backwards; write the lower CPU first")
    if last > MAX_CPU_ID:
        raise ValueError(
            f"CPU {last} in {item!r} is beyond the highest supported number {MAX_CPU_ID}"
        )
    used, group = (int(match[3]), int(match[4])) if match[4] else (1, int(match[3] or 1))
    if not 0 < used <= group:
        raise ValueError(
            f"{item!r}: expected 1 to {group} used CPUs per group of {group}, got {used}"
        )
    return range(first, last + 1), used, group


def format_cpulist(cpus: Iterable[int]) -> str:
    """Return the shortest list that `parse_cpulist` reads back as ``cpus``, such as ``0,4-11``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


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
            cpus = read_cpus(group / name)
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


def total_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process could use if nothing else ran."""
    total, limit = _memory_info(root, "MemTotal"), read_memory_limit_bytes(root)
    return total if limit is None else min(total, limit)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can allocate without swapping and within
    its control groups.

    Args:
        root: directory that holds ``proc`` and ``sys``; tests supply their own.
    """
    return max(0, min(available_by_limit(root).values()))


def available_by_limit(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes still available on the machine, and under the limit of each of this
    process's control groups.

    The keys are equal in processes of one host that share the limit: ``machine``, and the result of
    `identify` for a group.
    """
    return {"machine": _memory_info(root, "MemAvailable"), **dict(_available_in_groups(root))}


def _available_in_groups(root: Path) -> Iterator[tuple[str, int]]:
    """Yield each group with a limit and the bytes still available under it, from this process's own
    group to the root."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in own_groups(root, "memory"):
        for limit, use in (
            (read_int(folder / limit), read_int(folder / use)) for limit, use in names
        ):
            if limit is not None and use is not None:
                yield identify(folder), limit - use + min(use, _reclaimable(folder / "memory.stat"))


def _reclaimable(path: Path) -> int:
    """Return the bytes of page cache that the kernel drops before it refuses an allocation."""
    fields = dict(line.partition(" ")[::2] for line in (read_text(path) or "").splitlines())
    return positive(fields.get("total_inactive_file", fields.get("inactive_file", "")))


def _memory_info(root: Path, name: str) -> int:
    """Return a line of /proc/meminfo in bytes; psutil's number on a system without it."""
    text = read_text(root / "proc/meminfo") or ""
    kib = dict(line.partition(":")[::2] for line in text.splitlines()).get(name, "").split()
    if kib:
        return positive(kib[0]) << 10
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total if name == "MemTotal" else memory.available)
