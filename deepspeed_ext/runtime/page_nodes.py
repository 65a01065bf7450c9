"""Asks the kernel on which NUMA nodes pages lie. Does not import torch."""

from __future__ import annotations

import ctypes
import platform
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["nodes_of_pages", "placement_warning", "sampled_pages"]

MOVE_PAGES = {"x86_64": 279, "aarch64": 239, "ppc64le": 301, "s390x": 310, "riscv64": 239}
"""Number of the system call on each architecture."""
PAGE_BYTES = 4096
MOST_PAGES = 2048
"""Maximum number of pages in a sample."""
TOLERATED = 0.01
"""Share of the pages that may lie elsewhere without a warning."""


def sampled_pages(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Addresses of pages, spread evenly over memory.

    Args:
        spans: address and number of bytes of each array.
    """
    pages = [
        (address // PAGE_BYTES * PAGE_BYTES, -(-nbytes // PAGE_BYTES)) for address, nbytes in spans
    ]
    every = max(1, sum(count for _, count in pages) // MOST_PAGES)
    return [begin + PAGE_BYTES * page for begin, count in pages for page in range(0, count, every)]


def nodes_of_pages(addresses: Sequence[int]) -> dict[int, int]:
    """Number of these pages on each NUMA node, without pages that are not in memory; empty if the
    kernel does not say."""
    number = MOVE_PAGES.get(platform.machine())
    if number is None or not addresses:
        return {}
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    statuses = (ctypes.c_int * len(addresses))()
    count = ctypes.c_ulong(len(addresses))
    if ctypes.CDLL(None).syscall(number, 0, count, pages, None, statuses, 0) != 0:
        return {}
    return dict(Counter(status for status in statuses if status >= 0))


def placement_warning(found: Mapping[int, int], wanted: int) -> str | None:
    """The warning about pages that are not on node `wanted`; None: there are too few. A pure
    function.

    Args:
        found: number of pages on each node.
    """
    total, elsewhere = sum(found.values()), {node: n for node, n in found.items() if node != wanted}
    away = sum(elsewhere.values())
    if wanted < 0 or away <= TOLERATED * total:
        return None
    where = ", ".join(f"{n / total:.0%} on node {node}" for node, n in sorted(elsewhere.items()))
    return (
        f"has {away / total:.0%} of its memory away from node {wanted}, where its cores are "
        f"({where}): that node was full, and all ranks wait for the slowest. Free memory there "
        "(numactl -H shows it; files in the page cache count, and a reboot or vm.drop_caches "
        "frees those), or put fewer ranks on that node"
    )
