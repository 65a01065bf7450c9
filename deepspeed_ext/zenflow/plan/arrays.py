"""Describes the arena's arrays and places them. Pure functions; `worker.arena` maps the memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

OF_CHUNKS = -1
"""In place of a partition's number: slots that chunks of all partitions take in turn."""

PAGE_BYTES = 4096
_LINE_BYTES = 64
_BIG_BYTES = 1 << 20
"""Arrays below this size stay in a cache wherever they start."""
_HUGE_PAGE_BYTES = 1 << 21
_APART_BYTES = 3 * PAGE_BYTES + 5 * _LINE_BYTES
"""Staggers the starts of arrays so that they do not share cache sets. Both numbers are odd, so
`_PLACES` arrays start on as many different lines of a page; then the pattern repeats."""
_PLACES = 64


class ArrayKey(NamedTuple):
    """Identifies an array by kind, partition and, for gradients and y, slot of the ring."""

    kind: str
    """``p``, a moment (``m``, ``v``), its scales or where it is shown (``m_scales``, ``m_shown``),
    ``y``, ``g``, or the kind of the rule's per-block array (see `deepspeed_ext.zenflow`)."""
    partition: int = 0
    slot: int = 0


@dataclass(frozen=True)
class ArraySpec:
    """One array of the arena."""

    kind: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    numel: int
    partition: int = 0
    slot: int = 0
    touched: bool = True
    """The worker touches its pages at start, which places them on its memory node; otherwise on
    first use."""
    exchanged: bool = False
    """It is copied to or from the accelerator, so it is page-locked."""
    before: int = 0
    """Elements (of scales, blocks) directly before it that step on the accelerator (see
    `Arena.whole`). No pass reads them; they take memory only while they are shown."""
    per_block: int = 0
    """Entries for each block; 0: one for each element."""
    replaced_by: str | None = None
    """Dtype of y, which takes the place of this gradient; None: it does not. Both have the same
    item size, so y of an element replaces only the gradient of that element."""

    @property
    def key(self) -> ArrayKey:
        return ArrayKey(self.kind, self.partition, self.slot)

    @property
    def nbytes(self) -> int:
        """Its size in bytes, without what lies before it."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def before_bytes(self) -> int:
        return self.before * DTYPE_BYTES[self.dtype]


class PlacedArray(NamedTuple):
    """An array and its offset in the arena, in bytes."""

    spec: ArraySpec
    offset: int


@dataclass(frozen=True)
class ArenaLayout:
    """Where all arrays are. Trainer and worker hold equal copies."""

    arrays: tuple[PlacedArray, ...]
    nbytes: int

    def by_key(self) -> Mapping[ArrayKey, PlacedArray]:
        """Every slot of the ring has a y: in its gradient's place, or the one shared array."""
        found = {array.spec.key: array for array in self.arrays}
        for spec, offset in self.arrays:
            if spec.replaced_by is not None:
                published = replace(spec, kind="y", dtype=spec.replaced_by, replaced_by=None)
                found[published.key] = PlacedArray(published, offset)
            elif spec.kind == "g" and (own := found.get(ArrayKey("y", spec.partition))) is not None:
                found[ArrayKey("y", spec.partition, spec.slot)] = own
        return MappingProxyType(found)

    def relaid(self, specs: Iterable[ArraySpec]) -> ArenaLayout:
        """This layout with `specs`, the same arrays with fewer elements on the host. An array with
        elements before it begins that much later. The others stay in place: they hold nothing that
        the next step reads.
        """
        found = {array.spec.key: array for array in self.arrays}
        arrays = []
        for spec in specs:
            was, offset = found[spec.key]
            further = (spec.before - was.before) * DTYPE_BYTES[spec.dtype]
            assert further >= 0, "elements move to the accelerator, not back"
            assert spec.before + spec.numel <= was.before + was.numel, "an array does not grow"
            arrays.append(PlacedArray(spec, offset + further))
        return ArenaLayout(tuple(arrays), self.nbytes)

    def page_bytes(self) -> Mapping[ArrayKey, int]:
        """Bytes of the pages of each array: the memory that it takes once all of it is touched. No
        page holds two arrays."""
        return MappingProxyType(
            {
                spec.key: round_up(offset % PAGE_BYTES + spec.nbytes, PAGE_BYTES)
                if spec.numel
                else 0
                for spec, offset in self.arrays
            }
        )


def plan_layout(specs: Sequence[ArraySpec]) -> ArenaLayout:
    """Place `specs` one after the other, no two on one page, because page-locking is per page.

    A pass reads several arrays at once. If arrays of a power-of-two size simply followed each
    other, their starts would fall into the same cache sets and memory banks. So each big array
    starts at a multiple of 2 MiB plus an offset that grows by `_APART_BYTES` per array. The bytes
    between arrays are never touched: they take addresses but no memory.
    """
    assert len({spec.key for spec in specs}) == len(specs), "keys of arrays are unique"
    arrays: list[PlacedArray] = []
    end = big = 0
    for spec in specs:
        is_big = spec.nbytes >= _BIG_BYTES
        offset = round_up(end + spec.before_bytes, _HUGE_PAGE_BYTES if is_big else PAGE_BYTES)
        if is_big:
            offset += big % _PLACES * _APART_BYTES
            big += 1
        arrays.append(PlacedArray(spec, offset))
        end = offset + spec.nbytes
    return ArenaLayout(tuple(arrays), max(PAGE_BYTES, round_up(end, PAGE_BYTES)))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
