"""Measures the host memory that this process may use, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from deepspeed_ext.runtime.cgroup import identify, own_groups, read_memory_limit_bytes
from deepspeed_ext.runtime.procfs import positive, read_int, read_text

__all__ = ["available_by_limit", "available_host_bytes", "total_host_bytes"]


def total_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process could use if nothing else ran."""
    total, limit = psutil.virtual_memory().total, read_memory_limit_bytes(root)
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
    return {"machine": psutil.virtual_memory().available, **dict(_available_in_groups(root))}


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
