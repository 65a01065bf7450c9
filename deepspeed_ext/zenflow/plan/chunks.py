"""Defines how much is copied or computed at once, which bounds temporaries, in elements."""

from __future__ import annotations

from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of

CHUNK_NUMEL = 1 << 24
"""Minimum number of elements of a chunk that travels beside the step, before rounding to whole
blocks."""

MOST_CHUNKS = 64
"""Maximum number of chunks of all partitions together, not counting the last of each. More chunks
cost launches, two per chunk and step; fewer make a step wait longer, by about one chunk's copies
and pass."""

SLOTS_OF_CHUNKS = 4
"""Chunks on the host at once, if they reuse slots: one with the worker, the next one waiting, and
one on its way in each direction. At least 2: the courier hands a chunk over before it waits for the
one before."""


def chunk_numel(numel: int, block_size: int) -> int:
    """Elements per chunk, if all partitions together have `numel` elements."""
    fewest = -(-numel // MOST_CHUNKS)
    return max(chunk_of(CHUNK_NUMEL, block_size), -(-fewest // block_size) * block_size)
