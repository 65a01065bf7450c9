"""Provides the memory that trainer and worker share: one memfd with typed arrays, laid out by
`plan.arrays`.

A memfd needs no /dev/shm and vanishes with the last process that holds it. A page takes memory only
once it is touched, so an unused array costs nothing. The mapping is excluded from core dumps and
from forked processes, which would keep the memory alive and see it change. Importing this module
does not import torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.zenflow.plan.arrays import PAGE_BYTES, ArenaLayout, ArrayKey, round_up
from deepspeed_ext.zenflow.worker.channel import above_standard
from deepspeed_ext.zenflow.worker.kernel.passes import Array

if TYPE_CHECKING:
    import torch

__all__ = ["Arena"]

_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A mapping of the shared memory. `create` allocates it; the constructor maps another
    process's.

    Args:
        fileno: the memfd; the arena takes ownership.
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
                "ZenFlow shares memory between processes with memfd_create, "
                "which needs Linux: turn zenflow off"
            )
        fileno = -1
        try:
            fileno = above_standard(os.memfd_create("deepspeed_ext-arena", os.MFD_CLOEXEC))
            os.ftruncate(fileno, layout.nbytes)
            return cls(fileno, layout)
        except OSError as error:
            if fileno >= 0:
                os.close(fileno)
            limit = (
                "open files (ulimit -n)"
                if error.errno == errno.EMFILE
                else "memory (ulimit -v, -f)"
            )
            raise UnsupportedError(
                f"the kernel refuses {layout.nbytes:,} bytes of shared memory "
                f"for the optimizer process: {error}. Raise the limit on {limit}, "
                "use more ranks (each holds less), or turn zenflow off"
            ) from error

    @property
    def address(self) -> int:
        """The address of the arena in this process."""
        return self._address

    def find(self, address: int, nbytes: int) -> int | None:
        """The offset in the arena of the `nbytes` bytes at `address`; None if they are not in
        it."""
        begin = address - self._address
        return begin if begin >= 0 and begin + nbytes <= self.layout.nbytes else None

    def keys(self, kind: str, partition: int) -> list[ArrayKey]:
        """The keys of a partition's arrays of one kind, by slot."""
        return [
            spec.key
            for spec, _ in self.layout.arrays
            if (spec.kind, spec.partition) == (kind, partition)
        ]

    def has(self, kind: str, partition: int = 0) -> bool:
        """Whether a partition has an array of this kind."""
        return ArrayKey(kind, partition) in self._arrays

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
        """An array with the elements before it, as one 1-D CPU tensor: all p, m or v of a partition
        of ZeRO. It stays the same after `relay`."""
        import torch

        spec, offset = self._arrays[ArrayKey(kind, partition)]
        count, begin = spec.before + spec.numel, offset - spec.before_bytes
        if count == 0:
            return self.tensor(kind, partition)
        return torch.frombuffer(
            self._memory, dtype=getattr(torch, spec.dtype), count=count, offset=begin
        )

    def before(self, kind: str, partition: int = 0) -> int:
        """The number of elements before an array, which step on the accelerator."""
        return self._arrays[ArrayKey(kind, partition)].spec.before

    def whole_array(self, kind: str, partition: int = 0) -> Array:
        """The address of what `whole` returns; valid while the arena exists."""
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = self._address + offset - spec.before_bytes
        return Array(begin, spec.dtype, spec.before + spec.numel)

    def relay(self, layout: ArenaLayout) -> None:
        """Use `layout` from now on. Existing tensors and addresses stay valid."""
        assert layout.nbytes == self.layout.nbytes, "the same memory"
        self.layout = layout
        self._arrays = layout.by_key()

    def release_before(self, kind: str, partition: int = 0) -> None:
        """Free the memory of the elements before an array; they read as zero until they are written
        again."""
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = round_up(offset - spec.before_bytes, PAGE_BYTES)
        if (nbytes := offset // PAGE_BYTES * PAGE_BYTES - begin) > 0:
            _require(_libc.madvise(self._address + begin, nbytes, _MADV_REMOVE) == 0)

    def release(self, kind: str, partition: int = 0) -> None:
        """Free the memory of an array and of the elements before it; they read as zero until they
        are written again. No page holds another array."""
        self.release_before(kind, partition)
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = offset // PAGE_BYTES * PAGE_BYTES
        if spec.numel:
            end = round_up(offset + spec.nbytes, PAGE_BYTES)
            _require(_libc.madvise(self._address + begin, end - begin, _MADV_REMOVE) == 0)

    def close(self) -> None:
        """Close the memfd, so that no other process can map the arena. The memory is freed once no
        process maps it and no tensor refers to it. Idempotent."""
        self._finalizer()
        self.fileno = -1

    def discard(self) -> None:
        """Free the memory at once, for all processes; existing tensors read as zero from now on."""
        _require(_libc.madvise(self._address, self.layout.nbytes, _MADV_REMOVE) == 0)


def _map(fileno: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Create a shared mapping that ends with the last reference to the result.

    `mmap.mmap` would keep a copy of the descriptor, with which every forked process would keep the
    memory alive.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fileno, 0)
    _require(address != _MAP_FAILED)
    for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        # errors are ignored: without huge pages it is a little slower
        _libc.madvise(address, nbytes, advice)
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
