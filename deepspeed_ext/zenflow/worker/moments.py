"""Shows moments that are codes to others, in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.definition import decode, encode
from deepspeed_ext.zenflow.worker.kernel.passes import SHOWN_NUMEL, StateLayout, chunk_of


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
        self._arena, self._block_size = arena, block_size
        kinds = zip(layout.kinds[1:], layout.scales, layout.shown, strict=layout.is_coded)
        self._coded = [(index, *of_one) for of_one in kinds for index in range(partitions)]
        self._leads = False  # what is shown may be written; codes lead from a step on
        self._takes_memory = False

    def _runs(
        self, address: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Runs of whole blocks: codes (int8 of m, uint8 of v), scales (uint8), and fp32 values;
        of the moment that is shown at an address, or of all."""
        numel = chunk_of(SHOWN_NUMEL, self._block_size)
        for index, *kinds in self._coded:
            if address not in (None, self._arena.array(kinds[-1], index, whole=True).address):
                continue
            codes, scales, shown = (self._arena.whole(kind, index) for kind in kinds)
            runs = codes.split(numel), scales.split(numel // self._block_size), shown.split(numel)
            yield from zip(*runs, strict=False)

    def show(self) -> None:
        """Show them. The arena must not be in use, and must hold all codes."""
        was_shown = self._leads
        self._takes_memory = self._leads = bool(self._coded)
        if not was_shown:
            for codes, scales, shown in self._runs():
                decode(codes, scales, self._block_size, shown)

    def take(self) -> None:
        """Take back what others may have written where they are shown."""
        if self._leads:
            for codes, scales, shown in self._runs():
                encode(shown, codes, scales, self._block_size)

    def put(self, address: int, values: torch.Tensor | None) -> None:
        """Replace a moment that would be shown at an address, and is not, by `values`, 1-D [n], or
        zeros. A load that showed it would take 4 bytes per element more."""
        begin = 0
        for codes, scales, _ in self._runs(address):
            end = begin + codes.numel()
            run = torch.zeros_like(codes) if values is None else values[begin:end]
            begin = end
            encode(run.to(codes.device, torch.float32), codes, scales, self._block_size)

    def begin_step(self) -> None:
        """From now on codes are the state again."""
        self._leads = False

    def hide(self) -> None:
        """Free the memory of what is no longer read, once codes are the state again."""
        if self._takes_memory:
            self._takes_memory = False
            for index, _, _, shown in self._coded:
                self._arena.release(shown, index)

    def hidden_at(self, address: int) -> tuple[tuple[str, int], int] | None:
        """The moment that would be shown at an address, and is not: kind and partition of its
        codes; and the block size."""
        for index, kind, _, shown in () if self._leads else self._coded:
            if self._arena.array(shown, index, whole=True).address == address:
                return (kind, index), self._block_size
        return None
