"""Provides the memory that trainer and worker share: one memfd with typed arrays at offsets planned by a pure function.

A memfd needs no /dev/shm and vanishes with the last process that holds it. A page takes memory only once it is touched,
so an array that is planned but never used costs nothing. The mapping is excluded from core dumps and from forked
processes, which would otherwise keep the memory alive and see it change. Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.zenflow.worker.channel import above_standard
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES, Array

if TYPE_CHECKING:
    import torch

__all__ = [
    "OF_CHUNKS",
    "Arena",
    "ArenaLayout",
    "ArrayKey",
    "ArraySpec",
    "PlacedArray",
    "bytes_at_start",
    "partition_specs",
    "plan_layout",
]

OF_CHUNKS = -1
"""In place of a partition's number: places that chunks of all partitions take in turn."""

_LINE_BYTES = 64
_PAGE_BYTES = 4096
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_BIG_BYTES = 1 << 20
"""The position of an array matters only from this size on; smaller arrays stay in a cache anyway."""
_HUGE_PAGE_BYTES = 1 << 21
_APART_BYTES = 3 * _PAGE_BYTES + 5 * _LINE_BYTES
"""Staggers the starts of arrays so that they do not share cache sets. Both numbers are odd, so `_PLACES` arrays start
on as many different lines of a page; then the pattern repeats."""
_PLACES = 64


class ArrayKey(NamedTuple):
    """Identifies an array by kind, partition and, for gradients and y, slot of the ring."""

    kind: str
    """``p``, a moment (``m``, ``v``), its scales or where it is shown (``m_scales``, ``m_shown``), ``y``,
    ``g``, or the kind of the rule's per-block array (see `deepspeed_ext.zenflow`)."""
    partition: int = 0
    slot: int = 0


@dataclass(frozen=True)
class ArraySpec:
    """Describes one array of the arena."""

    kind: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    numel: int
    partition: int = 0
    slot: int = 0
    touched: bool = True
    """The worker touches its pages at start, which places them on its memory node; otherwise on first use."""
    exchanged: bool = False
    """It is copied to or from the accelerator and therefore page-locked."""
    before: int = 0
    """Elements directly before it that step on the accelerator (see `Arena.whole`). The worker does not know them; they
    take memory only while they are shown."""
    replaced_by: str | None = None
    """Dtype of y, which takes the place of this gradient; None: it does not. Both have the same item size, so y of an
    element replaces only the gradient of that element."""

    @property
    def key(self) -> ArrayKey:
        """Its key."""
        return ArrayKey(self.kind, self.partition, self.slot)

    @property
    def nbytes(self) -> int:
        """Its size in bytes, without what lies before it."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def before_bytes(self) -> int:
        """The size in bytes of what lies before it."""
        return self.before * DTYPE_BYTES[self.dtype]


class PlacedArray(NamedTuple):
    """An array and its offset in the arena, in bytes."""

    spec: ArraySpec
    offset: int


@dataclass(frozen=True)
class ArenaLayout:
    """Positions of all arrays. Trainer and worker hold equal copies."""

    arrays: tuple[PlacedArray, ...]
    nbytes: int

    def by_key(self) -> Mapping[ArrayKey, PlacedArray]:
        """The arrays by key. There is a y for each slot of the ring: in the place of its gradient, or always the same
        array."""
        found = {array.spec.key: array for array in self.arrays}
        for spec, offset in self.arrays:
            if spec.replaced_by is not None:
                published = replace(spec, kind="y", dtype=spec.replaced_by, replaced_by=None)
                found[published.key] = PlacedArray(published, offset)
            elif spec.kind == "g" and (own := found.get(ArrayKey("y", spec.partition))) is not None:
                found[ArrayKey("y", spec.partition, spec.slot)] = own
        return MappingProxyType(found)

    def page_bytes(self) -> Mapping[ArrayKey, int]:
        """Bytes of the pages of each array: the memory that it takes once all of it is touched. No page holds two
        arrays."""
        return MappingProxyType({array.spec.key: _page_bytes(array) for array in self.arrays})


def _page_bytes(array: PlacedArray) -> int:
    first = array.offset // _PAGE_BYTES * _PAGE_BYTES
    return 0 if array.spec.numel == 0 else _round_up(array.offset + array.spec.nbytes, _PAGE_BYTES) - first


def partition_specs(
    partition: int,
    numel: int,
    *,
    block_size: int,
    publish_dtype: str,
    grad_dtype: str,
    slots: int,
    touched_slots: int,
    per_block: tuple[str, str, bool],
    lifts_weights: bool = True,
    before: int = 0,
    states: Sequence[tuple[str, str]] = (("p", "float32"), ("m", "float32"), ("v", "float32")),
    scales: Sequence[str] = (),
    shown: Sequence[str] = (),
    per_block_width: int = 1,
) -> list[ArraySpec]:
    """The arrays of one partition of `numel` elements (see the glossary in `deepspeed_ext.zenflow`).

    y takes the place of the newest gradient that went into it. It has an array of its own if their item sizes differ:
    y of some elements would replace gradients of others, which another thread may not have read.

    Args:
        numel: its elements, n.
        publish_dtype: dtype of y.
        slots: slots of the gradient ring.
        touched_slots: slots that are certainly used; the others take memory only on first use.
        per_block: kind and dtype of the rule's per-block array, and whether it is copied to the accelerator.
        lifts_weights: whether y is copied to the accelerator; gradients always come from there.
        before: elements before them, of the same partition of ZeRO, that step on the accelerator.
        states: kinds and dtypes of p and of the optimizer's moments.
        scales: kinds of arrays with a scale for each block.
        shown: kinds of fp32 arrays that take memory only while moments are shown in them.
        per_block_width: elements of the per-block array for one block.
    """
    blocks, (kind, dtype, exchanged) = -(-numel // block_size), per_block
    replaces = DTYPE_BYTES[publish_dtype] == DTYPE_BYTES[grad_dtype]
    gradient = ArraySpec(
        "g", grad_dtype, numel, partition, exchanged=True, replaced_by=publish_dtype if replaces else None
    )
    return [
        *(ArraySpec(name, its_dtype, numel, partition, before=before) for name, its_dtype in states),
        *(ArraySpec(name, "uint8", blocks, partition) for name in scales),
        *(ArraySpec(name, "float32", numel, partition, touched=False) for name in shown),
        *([] if replaces else [ArraySpec("y", publish_dtype, numel, partition, exchanged=lifts_weights)]),
        ArraySpec(kind, dtype, blocks * per_block_width, partition, exchanged=exchanged),
        *(replace(gradient, slot=slot, touched=slot < touched_slots) for slot in range(slots)),
    ]


def bytes_at_start(specs: Iterable[ArraySpec]) -> int:
    """Bytes of the arrays that the worker touches at start; the others take memory on first use."""
    return sum(spec.nbytes for spec in specs if spec.touched)


def plan_layout(specs: Sequence[ArraySpec]) -> ArenaLayout:
    """Place `specs` one after the other, no two on one page, because page-locking is per page.

    A pass reads several arrays at once. If arrays of a power-of-two size simply followed each other, their starts would
    fall into the same cache sets and memory banks and evict each other. So each big array starts behind a multiple of 2
    MiB, at a distance that grows by `_APART_BYTES` per array. The bytes between arrays are never touched: they take
    addresses but no memory.
    """
    assert len({spec.key for spec in specs}) == len(specs), "keys of arrays are unique"
    arrays: list[PlacedArray] = []
    end = big = 0
    for spec in specs:
        is_big = spec.nbytes >= _BIG_BYTES
        offset = _round_up(end + spec.before_bytes, _HUGE_PAGE_BYTES if is_big else _PAGE_BYTES)
        if is_big:
            offset += big % _PLACES * _APART_BYTES
            big += 1
        arrays.append(PlacedArray(spec, offset))
        end = offset + spec.nbytes
    return ArenaLayout(tuple(arrays), max(_PAGE_BYTES, _round_up(end, _PAGE_BYTES)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Arena:
    """A mapping of the shared memory. `create` makes the memory; the constructor maps what another process made.

    Args:
        fileno: the memfd, of which this takes ownership.
        layout: positions of the arrays.

    Attributes:
        fileno: the memfd; -1 after `close`.
    """

    def __init__(self, fileno: int, layout: ArenaLayout) -> None:
        self._memory = _map(fileno, layout.nbytes)
        self.fileno = fileno
        self.layout = layout
        self._arrays = layout.by_key()
        self._address = ctypes.addressof(self._memory)
        self._finalizer = weakref.finalize(self, os.close, fileno)

    @classmethod
    def create(cls, layout: ArenaLayout) -> Arena:
        """Create a zeroed arena.

        Raises:
            UnsupportedError: the platform has no memfd, or the kernel refuses one of this size.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError(
                "ZenFlow shares memory between processes with memfd_create, which needs Linux: turn zenflow off"
            )
        fileno = -1
        try:
            fileno = above_standard(os.memfd_create("deepspeed_ext-arena", os.MFD_CLOEXEC))
            os.ftruncate(fileno, layout.nbytes)
            return cls(fileno, layout)
        except OSError as error:
            if fileno >= 0:
                os.close(fileno)
            limit = "open files (ulimit -n)" if error.errno == errno.EMFILE else "memory (ulimit -v, -f)"
            raise UnsupportedError(
                f"the kernel refuses {layout.nbytes:,} bytes of shared memory for the optimizer process: {error}. "
                f"Raise the limit on {limit}, use more ranks (each holds less), or turn zenflow off"
            ) from error

    @property
    def address(self) -> int:
        """The address of the arena in this process."""
        return self._address

    def find(self, address: int, nbytes: int) -> int | None:
        """The offset in the arena of the `nbytes` bytes at `address`; None: they are not in the arena."""
        begin = address - self._address
        return begin if begin >= 0 and begin + nbytes <= self.layout.nbytes else None

    def keys(self, kind: str, partition: int) -> list[ArrayKey]:
        """The keys of a partition's arrays of one kind, by slot."""
        return [spec.key for spec, _ in self.layout.arrays if (spec.kind, spec.partition) == (kind, partition)]

    def array(self, kind: str, partition: int = 0, slot: int = 0) -> Array:
        """The address of an array; valid while the arena exists."""
        spec, offset = self._arrays[ArrayKey(kind, partition, slot)]
        return Array(self._address + offset, spec.dtype, spec.numel)

    def tensor(self, kind: str, partition: int = 0, slot: int = 0) -> torch.Tensor:
        """An array as a 1-D CPU tensor that shares its memory and keeps the mapping alive."""
        import torch

        spec, offset = self._arrays[ArrayKey(kind, partition, slot)]
        dtype = getattr(torch, spec.dtype)
        if spec.numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=spec.numel, offset=offset)

    def whole(self, kind: str, partition: int = 0) -> torch.Tensor:
        """An array with the elements before it, as one 1-D CPU tensor: all p, m or v of a partition of ZeRO."""
        import torch

        spec, offset = self._arrays[ArrayKey(kind, partition)]
        count, begin = spec.before + spec.numel, offset - spec.before_bytes
        if count == 0:
            return self.tensor(kind, partition)
        return torch.frombuffer(self._memory, dtype=getattr(torch, spec.dtype), count=count, offset=begin)

    def release_before(self, kind: str, partition: int = 0) -> None:
        """Free the memory of the elements before an array; they read as zero until they are written again."""
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = _round_up(offset - spec.before_bytes, _PAGE_BYTES)
        if (nbytes := offset // _PAGE_BYTES * _PAGE_BYTES - begin) > 0:
            _require(_libc.madvise(self._address + begin, nbytes, _MADV_REMOVE) == 0)

    def release(self, kind: str, partition: int = 0) -> None:
        """Free the memory of an array; it reads as zero until it is written again. No page holds another array."""
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = offset // _PAGE_BYTES * _PAGE_BYTES
        if spec.numel:
            end = _round_up(offset + spec.nbytes, _PAGE_BYTES)
            _require(_libc.madvise(self._address + begin, end - begin, _MADV_REMOVE) == 0)

    def close(self) -> None:
        """Close the memfd, so that no other process can map the arena. The memory is freed once no process maps it
        and no tensor refers to it. Idempotent."""
        self._finalizer()
        self.fileno = -1

    def discard(self) -> None:
        """Free the memory at once, for all processes; existing tensors read as zero from now on."""
        _require(_libc.madvise(self._address, self.layout.nbytes, _MADV_REMOVE) == 0)


def _map(fileno: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Create a shared mapping that ends with the last reference to the result.

    Not with `mmap.mmap`, which keeps a copy of the descriptor: every forked process would then keep the memory alive.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fileno, 0)
    _require(address != _MAP_FAILED)
    for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        _libc.madvise(address, nbytes, advice)  # errors are ignored: without huge pages it is a little slower
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: the mapping ends with the process, after everything that may still use it.
    weakref.finalize(memory, _unmap, address, nbytes, os.getpid()).atexit = False
    return memory


def _unmap(address: int, nbytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked process may have something else at this address
        _libc.munmap(address, nbytes)


def _require(succeeded: bool) -> None:
    """Raise an `OSError` from errno unless the last C library call succeeded."""
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
