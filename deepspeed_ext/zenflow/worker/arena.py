"""The memory that trainer and worker share: one memfd that holds typed arrays at offsets planned by a pure function.

A memfd needs no /dev/shm and vanishes with the last process that holds it. Pages take memory once they are touched:
an array that is planned and never used costs nothing. The mapping is left out of core dumps, and forked processes do
not have it: they would keep the memory, and see it change under them. Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from deepspeed_ext._errors import UnsupportedError
from deepspeed_ext.zenflow.kernel.adam_pass import DTYPE_BYTES, Array
from deepspeed_ext.zenflow.worker.channel import above_standard

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "ArenaLayout", "ArrayKey", "ArraySpec", "PlacedArray", "plan_layout"]

_LINE_BYTES = 64
_PAGE_BYTES = 4096
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_BIG_BYTES = 1 << 20
"""From here on it matters where in a page and in a MiB an array begins; smaller ones stay in a cache anyway."""
_LINES_APART = 5  # odd: 64 arrays begin on 64 different lines of a page
_PAGES_APART = 3
_NEIGHBOURS = 40  # arrays to stay apart from: they forbid 200 of the 256 pages of a MiB


class ArrayKey(NamedTuple):
    """Names an array: what it holds, of which partition, and for gradients in which slot of the ring."""

    kind: str
    """``p``, ``m``, ``v``, ``y``, ``g``, or the kind of the rule's array per block (see `deepspeed_ext.zenflow`)."""
    partition: int = 0
    slot: int = 0


@dataclass(frozen=True)
class ArraySpec:
    """An array that the arena is to hold."""

    kind: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    numel: int
    partition: int = 0
    slot: int = 0
    touched: bool = True
    """The worker touches its pages at start, so that they lie on its memory node; else memory is taken at first use."""
    exchanged: bool = False
    """It is copied to or from the accelerator, hence page-locked."""

    @property
    def key(self) -> ArrayKey:
        """Its name."""
        return ArrayKey(self.kind, self.partition, self.slot)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]


class PlacedArray(NamedTuple):
    """An array and where it begins in the arena, in bytes."""

    spec: ArraySpec
    offset: int


@dataclass(frozen=True)
class ArenaLayout:
    """Where every array lies. Trainer and worker hold equal copies."""

    arrays: tuple[PlacedArray, ...]
    nbytes: int

    def by_key(self) -> Mapping[ArrayKey, PlacedArray]:
        """The arrays by their keys."""
        return MappingProxyType({array.spec.key: array for array in self.arrays})


def plan_layout(specs: Sequence[ArraySpec]) -> ArenaLayout:
    """Place `specs` one behind the other, no two on one page: page-locking is per page.

    A pass reads several arrays at once. If those of a power of two elements simply followed each other, all their
    heads would fall into the same cache sets and memory banks, and evict each other. So big arrays begin on different
    cache lines of a page and on different pages of a MiB. The pages between them are never touched: they take addresses
    and no memory.
    """
    assert len({spec.key for spec in specs}) == len(specs), "keys of arrays are unique"
    arrays: list[PlacedArray] = []
    pages: deque[int] = deque(maxlen=_NEIGHBOURS)  # where in their MiB the latest big arrays begin
    end = big = 0
    for spec in specs:
        offset = _round_up(end, _PAGE_BYTES)
        if spec.nbytes >= _BIG_BYTES:
            offset += _first_free(offset // _PAGE_BYTES, pages) * _PAGE_BYTES
            pages.append(offset // _PAGE_BYTES)
            offset += big * _LINES_APART * _LINE_BYTES % _PAGE_BYTES
            big += 1
        arrays.append(PlacedArray(spec, offset))
        end = offset + spec.nbytes
    return ArenaLayout(tuple(arrays), max(_PAGE_BYTES, _round_up(end, _PAGE_BYTES)))


def _first_free(page: int, taken: Iterable[int]) -> int:
    """How many pages after `page` the first one lies that is far enough, within its MiB, from those `taken`."""
    per_mib = (1 << 20) // _PAGE_BYTES
    return next(
        skipped
        for skipped in range(per_mib)
        if all(_PAGES_APART <= (page + skipped - other) % per_mib <= per_mib - _PAGES_APART for other in taken)
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Arena:
    """A mapping of the shared memory. `create` makes it, `attach` maps what another process made.

    Attributes:
        fileno: the memfd; -1 after `close`.
        layout: where the arrays are.
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
        """Make a zeroed arena.

        Raises:
            UnsupportedError: the platform has no memfd, or the kernel refuses one of this size.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("ZenFlow shares memory between processes by memfd_create, which needs Linux")
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
                f"the kernel refuses {layout.nbytes:,} bytes of memory shared with the optimizer process: {error}. "
                f"Raise the limit on {limit}, use more ranks (each holds less), or turn zenflow off"
            ) from error

    @classmethod
    def attach(cls, fileno: int, layout: ArenaLayout) -> Arena:
        """Map an arena that another process created; takes over the descriptor."""
        return cls(fileno, layout)

    def array(self, kind: str, partition: int = 0, slot: int = 0) -> Array:
        """An array as an address; valid as long as the arena."""
        spec, offset = self._arrays[ArrayKey(kind, partition, slot)]
        return Array(self._address + offset, spec.dtype, spec.numel)

    def tensor(self, kind: str, partition: int = 0, slot: int = 0) -> torch.Tensor:
        """An array as a 1-D CPU tensor that shares its memory; it keeps the mapping alive."""
        import torch

        spec, offset = self._arrays[ArrayKey(kind, partition, slot)]
        dtype = getattr(torch, spec.dtype)
        if spec.numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=spec.numel, offset=offset)

    def resident_bytes(self) -> int:
        """Bytes of memory that the arena takes now: its touched pages."""
        is_resident = (ctypes.c_char * -(-self.layout.nbytes // mmap.PAGESIZE))()
        _require(_libc.mincore(self._address, self.layout.nbytes, is_resident) == 0)
        return is_resident.raw.count(1) * mmap.PAGESIZE

    def close(self) -> None:
        """Close the memfd: nobody else can map the arena. The memory goes once no process maps it and no tensor refers
        to it. Idempotent."""
        self._finalizer()
        self.fileno = -1

    def discard(self) -> None:
        """Give the memory back at once, for all processes: what the tensors hold is zero from now on."""
        _require(_libc.madvise(self._address, self.layout.nbytes, _MADV_REMOVE) == 0)


def _map(fileno: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """A shared mapping that ends with the last reference to the result.

    Not `mmap.mmap`, which keeps a copy of the descriptor: every process that is forked would hold the memory by it.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fileno, 0)
    _require(address != _MAP_FAILED)
    for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        _libc.madvise(address, nbytes, advice)  # no huge pages for shared memory here: it costs a little speed
    memory = (ctypes.c_char * nbytes).from_address(address)
    # At exit the mapping goes with the process, after everything that may still use it.
    weakref.finalize(memory, _unmap, address, nbytes, os.getpid()).atexit = False
    return memory


def _unmap(address: int, nbytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # in a forked process something else may be there
        _libc.munmap(address, nbytes)


def _require(succeeded: bool) -> None:
    """Raise what the C library says, unless its last call succeeded."""
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
