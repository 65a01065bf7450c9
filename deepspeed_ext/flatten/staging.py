"""Streaming between accelerator and pageable host memory through two page-locked chunks.

A transfer from pageable memory is several times slower than one from page-locked memory, and page-locking a whole
buffer costs more than moving it once. So the link works on one chunk while the processor moves the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext import allocation
from deepspeed_ext._upstream import get_accelerator

__all__ = ["CHUNK_BYTES", "Staging"]

CHUNK_BYTES = 32 << 20
"""Size of one of the two chunks of a `Staging`."""


class Staging:
    """Two chunks of host memory, used in turn.

    Args:
        dtype: of what is moved.
        pin: page-lock the chunks (where the accelerator can).
    """

    def __init__(self, dtype: torch.dtype, pin: bool) -> None:
        self.numel = max(1, CHUNK_BYTES // dtype.itemsize)
        self._dtype, self._pin = dtype, pin
        self._chunks: list[torch.Tensor] = []
        self._events: list[Any] = [None, None]

    def reserve(self, numel: int) -> None:
        """Allocate the chunks for transfers of `numel` elements, so that running out of memory shows here."""
        if not self._chunks:
            size = min(self.numel, numel)
            self._chunks = [allocation.host_empty(size, self._dtype, self._pin) for _ in range(2)]

    def _turns(self, numel: int) -> list[tuple[int, int, torch.Tensor]]:
        self.reserve(numel)
        step = self._chunks[0].numel()
        starts = range(0, numel, step)
        return [
            (turn % 2, start, self._chunks[turn % 2][: min(step, numel - start)]) for turn, start in enumerate(starts)
        ]

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, accelerator) into `target` (1-D, host; converted if its dtype differs)."""
        self.pack_to_host(lambda out, start: out.copy_(source[start : start + out.numel()], non_blocking=True), target)

    def pack_to_host(self, pack: Callable[[torch.Tensor, int], Any], target: torch.Tensor) -> None:
        """Fill `target` (1-D, host) with what ``pack(out, start)`` writes, a chunk `out` at a time."""
        pending: tuple[int, int, torch.Tensor] | None = None
        for turn in self._turns(target.numel()):
            pack(turn[2], turn[1])
            self._record(turn[0])
            if pending is not None:
                self._store(pending, target)
            pending = turn
        if pending is not None:
            self._store(pending, target)

    def _store(self, turn: tuple[int, int, torch.Tensor], target: torch.Tensor) -> None:
        slot, start, chunk = turn
        self._wait(slot)
        target[start : start + chunk.numel()].copy_(chunk)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, host) into `target` (1-D, accelerator)."""
        for slot, start, chunk in self._turns(target.numel()):
            self._wait(slot)  # the chunk's previous transfer must have left it
            chunk.copy_(source[start : start + chunk.numel()])
            target[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
            self._record(slot)
        for slot in range(2):
            self._wait(slot)

    def _record(self, slot: int) -> None:
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            self._events[slot] = accelerator.Event()
            self._events[slot].record(accelerator.current_stream())

    def _wait(self, slot: int) -> None:
        if self._events[slot] is not None:
            self._events[slot].synchronize()
            self._events[slot] = None
