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
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.zenflow.plan.arrays import PAGE_BYTES, ArenaLayout, ArrayKey, ArraySpec, round_up
from deepspeed_ext.zenflow.worker.kernel.passes import Array

if TYPE_CHECKING:
    import torch

_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A mapping of the shared memory. `create` allocates it; the constructor maps another
    process's.

    Args:
        fileno: the memfd; the arena takes ownership.
        layout: positions of the arrays.

    Attributes:
        address: of the arena in this process.
        fileno: the memfd; -1 after `close`.
    """

    def __init__(self, fileno: int, layout: ArenaLayout) -> None:
        self._memory = _map(fileno, layout.nbytes)
        self.fileno = fileno
        self.address = ctypes.addressof(self._memory)
        self.relay(layout)
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
            is_full = error.errno == errno.EMFILE
            limit = "open files (ulimit -n)" if is_full else "memory (ulimit -v, -f)"
            raise UnsupportedError(
                f"the kernel refuses {layout.nbytes:,} bytes of shared memory "
                f"for the optimizer process: {error}. Raise the limit on {limit}, "
                "use more ranks (each holds less), or turn zenflow off"
            ) from error

    def find(self, address: int, nbytes: int) -> int | None:
        """The offset in the arena of the `nbytes` bytes at `address`; None if they are not in
        it."""
        begin = address - self.address
        return begin if begin >= 0 and begin + nbytes <= self.layout.nbytes else None

    def keys(self, kind: str, partition: int) -> list[ArrayKey]:
        """The keys of a partition's arrays of one kind, by slot."""
        keys = (spec.key for spec, _ in self.layout.arrays)
        return [key for key in keys if key[:2] == (kind, partition)]

    def has(self, kind: str, partition: int = 0) -> bool:
        """Whether a partition has an array of this kind."""
        return ArrayKey(kind, partition) in self._arrays

    def spec(self, kind: str, partition: int = 0, slot: int = 0) -> ArraySpec:
        """The description of an array."""
        return self._arrays[ArrayKey(kind, partition, slot)].spec

    def array(self, kind: str, partition: int = 0, slot: int = 0, *, whole: bool = False) -> Array:
        """The address of an array; valid while the arena exists.

        Args:
            whole: with the elements before it, as one array: all p, m or v of a partition of ZeRO.
        """
        spec, offset = self._arrays[ArrayKey(kind, partition, slot)]
        begin, before = (spec.before_bytes, spec.before) if whole else (0, 0)
        return Array(self.address + offset - begin, spec.dtype, before + spec.numel)

    def tensor(self, kind: str, partition: int = 0, slot: int = 0) -> torch.Tensor:
        """An array as a 1-D CPU tensor that shares its memory and keeps the mapping alive."""
        return self._tensor(self.array(kind, partition, slot))

    def whole(self, kind: str, partition: int = 0) -> torch.Tensor:
        """An array with the elements before it, as one 1-D CPU tensor. It stays the same after
        `relay`."""
        return self._tensor(self.array(kind, partition, whole=True))

    def _tensor(self, array: Array) -> torch.Tensor:
        import torch

        dtype, offset = getattr(torch, array.dtype), array.address - self.address
        if array.numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=array.numel, offset=offset)

    def relay(self, layout: ArenaLayout) -> None:
        """Use `layout`, of the same memory, from now on. Existing tensors and addresses stay
        valid."""
        assert layout.nbytes == len(self._memory), "the same memory"
        self.layout = layout
        self._arrays = layout.by_key()

    def release_before(self, kind: str, partition: int = 0) -> None:
        """Free the memory of the elements before an array; they read as zero until they are written
        again."""
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        begin = round_up(offset - spec.before_bytes, PAGE_BYTES)
        self._free(begin, offset // PAGE_BYTES * PAGE_BYTES)

    def release(self, kind: str, partition: int = 0) -> None:
        """Free the memory of an array and of the elements before it; they read as zero until they
        are written again. No page holds another array."""
        self.release_before(kind, partition)
        spec, offset = self._arrays[ArrayKey(kind, partition)]
        if spec.numel:
            begin = offset // PAGE_BYTES * PAGE_BYTES
            self._free(begin, round_up(offset + spec.nbytes, PAGE_BYTES))

    def discard(self) -> None:
        """Free the memory at once, for all processes; existing tensors read as zero from now on."""
        self._free(0, self.layout.nbytes)

    def _free(self, begin: int, end: int) -> None:
        if end > begin:
            address = self.address + begin
            _require(_libc.madvise(address, end - begin, _MADV_REMOVE) == 0)

    def close(self) -> None:
        """Close the memfd, so that no other process can map the arena. The memory is freed once no
        process maps it and no tensor refers to it. Idempotent."""
        self._finalizer()
        self.fileno = -1


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


def above_standard(descriptor: int) -> int:
    """Return `descriptor`, or a copy above 2 that replaces it.

    A process started with a closed stdin gets descriptor 0 for the next file that it opens. A child
    that inherits this number would find its own stdin there instead.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)
