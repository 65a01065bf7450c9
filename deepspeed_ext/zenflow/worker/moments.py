"""Shows moments that are codes to others, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.moments import decode, encode
from deepspeed_ext.zenflow.worker.kernel.passes import SHOWN_NUMEL, StateLayout, chunk_of

__all__ = ["ShownMoments"]


@dataclass(frozen=True)
class _Codes:
    """A moment of one partition of ZeRO, of n elements.

    Attributes:
        kind, shown_kind, partition: kinds and partition of the arena's arrays of codes and of fp32
            values.
        codes: int8 [n] of m, uint8 [n] of v.
        scales: uint8 [ceil(n / block_size)].
        shown: fp32 [n].
    """

    kind: str
    shown_kind: str
    partition: int
    block_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    shown: torch.Tensor

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Runs of whole blocks: codes, scales and shown values."""
        step = chunk_of(SHOWN_NUMEL, self.block_size)
        scales = self.scales.split(step // self.block_size)
        return zip(self.codes.split(step), scales, self.shown.split(step), strict=False)


class ShownMoments:
    """The moments that are codes, shown in fp32 in arrays of the arena that take memory only while
    they are shown. Moments of other dtypes are shown as they are, and this does nothing.

    Codes that are shown and not written give the same codes again.

    Args:
        layout: the optimizer's state.
        partitions: number of partitions in the arena.
        block_size: elements of a block.
    """

    def __init__(self, layout: StateLayout, arena: Arena, partitions: int, block_size: int) -> None:
        self._arena = arena
        self._codes = [
            _Codes(kind, shown, index, block_size, *map(arena.whole, arrays, [index] * 3))
            for index in range(partitions)
            for kind, scales, shown in zip(
                layout.kinds[1:], layout.scales, layout.shown, strict=layout.is_coded
            )
            for arrays in [(kind, scales, shown)]
        ]
        self._leads = False  # what is shown may be written; codes lead from a step on
        self._takes_memory = False

    def show(self) -> None:
        """Show them. The arena must not be in use, and must hold all codes."""
        hidden = () if self._leads else self._codes
        self._takes_memory = self._leads = bool(self._codes)
        for each in hidden:
            for codes, scales, shown in each.parts():
                decode(codes, scales, each.block_size, shown)

    def take(self) -> None:
        """Take back what others may have written where they are shown."""
        for each in self._codes if self._leads else ():
            for codes, scales, shown in each.parts():
                encode(shown, codes, scales, each.block_size)

    def begin_step(self) -> None:
        """From now on codes are the state again."""
        self._leads = False

    def hide(self) -> None:
        """Free the memory of what is no longer read."""
        if self._takes_memory and not self._leads:
            self._takes_memory = False
            for each in self._codes:
                self._arena.release(each.shown_kind, each.partition)

    def hidden_at(self, address: int) -> tuple[tuple[str, int], int] | None:
        """The moment that would be shown at an address, and is not: kind and partition of its
        codes; and the block size."""
        for each in () if self._leads else self._codes:
            if each.shown.data_ptr() == address:
                return (each.kind, each.partition), each.block_size
        return None
