"""How much memory an arena takes."""

from __future__ import annotations

import ctypes
import mmap

from deepspeed_ext.zenflow.worker.arena import Arena

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_bytes(arena: Arena) -> int:
    """Bytes of memory that the arena takes now, counting touched pages."""
    nbytes = arena.layout.nbytes
    is_resident = (ctypes.c_char * -(-nbytes // mmap.PAGESIZE))()
    assert _libc.mincore(arena.address, nbytes, is_resident) == 0, ctypes.get_errno()
    return is_resident.raw.count(1) * mmap.PAGESIZE
