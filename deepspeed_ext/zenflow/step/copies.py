"""Finds replicated parameters whose copies would be predicted differently on different ranks.

With tensor parallelism a rank has shards of some parameters and copies of others. An element's
estimate depends on the mean of v over its block. A block with elements of both kinds has a
different mean on each rank, so the copies would silently diverge. Plain values, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Run", "largest_block_apart", "mixed"]


class Run(NamedTuple):
    """Elements of one parameter in a partition."""

    begin: int
    """Position of the first one in the partition."""
    end: int
    """Position after the last one."""
    is_copy: bool
    """Whether other tensor-parallel ranks have the same elements."""
    name: str = ""
    """What to call the parameter in a message."""


def mixed(runs: Sequence[Run], block_size: int) -> list[str]:
    """Names of the copies that share a block with a sharded parameter.

    Args:
        runs: of one partition, in any order.
    """
    divided: set[int] = set()
    for run in runs:
        # only the ends of a run can share a block with another
        if not run.is_copy and run.end > run.begin:
            divided |= {run.begin // block_size, (run.end - 1) // block_size}
    ends = [
        (run, {run.begin // block_size, (run.end - 1) // block_size})
        for run in runs
        if run.is_copy and run.end > run.begin
    ]
    return [run.name for run, blocks in ends if blocks & divided]


def largest_block_apart(partitions: Sequence[Sequence[Run]], block_size: int) -> int:
    """The largest power of two up to `block_size` with which no copy shares a block."""
    size = 1 << (block_size.bit_length() - 1)
    while size > 1 and any(mixed(runs, size) for runs in partitions):
        size //= 2
    return size
