"""Copies between accelerator and pageable host memory through two page-locked chunks.

A transfer from pageable memory is several times slower than one from page-locked memory, and
page-locking a whole buffer costs more than copying it once. So the accelerator transfers one chunk
while the CPU copies the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["Staging"]


class Staging:
    """Two chunks of host memory that transfers use alternately, page-locked if the accelerator
    can."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.numel = max(1, STAGING_CHUNK_BYTES // dtype.itemsize)
        self._dtype = dtype
        self._chunks: list[torch.Tensor] = []
        self._events: list[Any] = [None, None]

    def reserve(self, numel: int) -> None:
        """Allocate the chunks for transfers of `numel` elements, so that a lack of memory shows
        here and not later."""
        if not self._chunks:
            size = min(self.numel, max(1, numel))  # of nothing, too: a later transfer has elements
            self._chunks = [allocation.host_empty(size, self._dtype, pin=True) for _ in range(2)]

    def _parts(self, numel: int) -> list[tuple[int, int, torch.Tensor]]:
        """Divide a transfer into parts: (index of the chunk, first element, chunk cut to the part's
        length)."""
        self.reserve(numel)
        step = self._chunks[0].numel()
        starts = range(0, numel, step)
        return [
            (part % 2, start, self._chunks[part % 2][: min(step, numel - start)])
            for part, start in enumerate(starts)
        ]

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, accelerator) into `target` (1-D, host; converted if its dtype
        differs)."""
        self.pack_to_host(
            lambda out, start: out.copy_(source[start : start + out.numel()], non_blocking=True),
            target,
        )

    def pack_to_host(self, pack: Callable[[torch.Tensor, int], Any], target: torch.Tensor) -> None:
        """Fill `target` (1-D, host) in chunks; ``pack(out, start)`` writes the elements from
        `start` into `out`."""
        pending: tuple[int, int, torch.Tensor] | None = None
        for part in self._parts(target.numel()):
            pack(part[2], part[1])
            self._record(part[0])
            if pending is not None:
                self._store(pending, target)
            pending = part
        if pending is not None:
            self._store(pending, target)

    def _store(self, part: tuple[int, int, torch.Tensor], target: torch.Tensor) -> None:
        chunk_index, start, chunk = part
        self._wait(chunk_index)
        target[start : start + chunk.numel()].copy_(chunk)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, host) into `target` (1-D, accelerator)."""
        for chunk_index, start, chunk in self._parts(target.numel()):
            # the previous transfer from this chunk to the accelerator must be complete
            self._wait(chunk_index)
            chunk.copy_(source[start : start + chunk.numel()])
            target[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
            self._record(chunk_index)
        for chunk_index in range(2):
            self._wait(chunk_index)

    def _record(self, chunk_index: int) -> None:
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            self._events[chunk_index] = accelerator.Event()
            self._events[chunk_index].record(accelerator.current_stream())

    def _wait(self, chunk_index: int) -> None:
        if self._events[chunk_index] is not None:
            self._events[chunk_index].synchronize()
            self._events[chunk_index] = None
