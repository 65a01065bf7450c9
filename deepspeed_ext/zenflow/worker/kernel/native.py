"""Finds the native kernel, an optional library beside this file, which ``pip install`` builds or a
wheel contains, and calls its C++ passes (``*.cpp``) through ctypes. Does not import torch, which
keeps the worker small. ``DSEXT_NATIVE_KERNEL=0`` disables it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from deepspeed_ext.runtime.log import is_off, warn_once
from deepspeed_ext.zenflow.worker.kernel.passes import (
    DTYPE_BYTES,
    DTYPE_CODES,
    WORD,
    Array,
    Kernel,
    Pass,
    Passes,
    rounding_key,
)

ABI_VERSION = 21
BUILT = Path(__file__).parent / "_adam_pass.so"
"""The library. Its name has no Python version, because it does not use Python."""

_ADDRESS, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "dsext_decode": [_ADDRESS, _ADDRESS, _ADDRESS, _LONG, _LONG, _INT],
    "dsext_first_touch": [_ADDRESS, _LONG, _LONG, _LONG, _LONG, _INT, _ADDRESS],
    "dsext_thread_ids": [_ADDRESS, _INT],
}


def library_path(passes: type[Passes] | None = None) -> str | None:
    """Return the path of the native kernel, or ``None`` to use the reference, as for `passes`
    without a native function.

    Unless it is disabled, a kernel that is not available causes a warning with the reason.
    """
    if is_off("DSEXT_NATIVE_KERNEL") or (passes is not None and not passes.function):
        return None
    why = f"{BUILT} does not exist: deepspeed_ext was installed without a C++ compiler"
    if BUILT.exists():
        try:
            open_library(str(BUILT))
            return str(BUILT)
        except (OSError, AttributeError) as error:
            why = f"{BUILT} does not load ({error})"
    warn_once(
        "ZenFlow's optimizer step uses torch operations, several times slower than the native "
        f"kernel: {why}. Install the wheel, or install a C++ compiler and reinstall "
        "deepspeed_ext; DSEXT_NATIVE_KERNEL=0 accepts this"
    )
    return None


def open_library(path: str) -> ctypes.CDLL:
    """Load the library.

    Raises:
        OSError: the file cannot be loaded, is incomplete, or has another version.
    """
    _require_whole(path)
    library = ctypes.CDLL(path)
    if library.dsext_version() != ABI_VERSION:
        raise OSError(f"{path} does not have ABI version {ABI_VERSION}: rebuild the native kernel")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _require_whole(path: str) -> None:
    """Raise `OSError` for a library that an interrupted copy has cut: loading it would end the
    process with SIGBUS. The table of sections is the end of an ELF file."""
    with open(path, "rb") as file:
        header = file.read(64)
    if header[:4] == b"\x7fELF" and len(header) == 64:
        begin, size, count = struct.unpack("=Q10xHH", header[40:62])
        wanted, found = begin + size * count, os.path.getsize(path)
        if found < wanted:
            raise OSError(f"{path} has {found:,} of {wanted:,} bytes: install it again")


class _Arguments(ctypes.Structure):
    """``Pass`` of passes.h, and after it the optimizer's numbers."""

    _fields_: ClassVar = [
        *((name, _ADDRESS) for name in ("p", "grad", "published", "per_block")),
        *((name, _ADDRESS * 2) for name in ("moments", "scales")),
        *((name, _LONG) for name in ("numel", "block_size")),
        *((name, _INT) for name in ("grad_dtype", "published_dtype", "moment_dtype")),
        *((name, _INT) for name in ("steps", "peeks", "threads", "vectors")),
        ("first", ctypes.c_uint32),
        ("numbers", ctypes.c_float * 16),
    ]

    @classmethod
    def over(cls, work: Pass, vectors: bool) -> _Arguments:
        """The arguments of a pass, without those of a run."""
        grad, kinds = work.grad or work.published, len(work.layout.kinds)
        addresses = tuple(array.address for array in work.state)
        return cls(
            *(addresses[0], grad.address, work.published.address),
            None if work.per_block is None else work.per_block.address,
            *(addresses[1:kinds], addresses[kinds:]),
            *(work.numel, work.block_size),
            *(DTYPE_CODES[each.dtype] for each in (grad, work.published, work.state[1])),
            *(False, False, 1, vectors),
        )


class NativeKernel(Kernel):
    """Runs passes with the shared library at ``library``, on ``threads`` threads: the caller's, and
    others that the library starts at the first pass and keeps.

    Args:
        vectors: whether passes may use AVX-512 if the CPU has it; results are bitwise the same.

    Raises:
        OSError: the file cannot be loaded, or has another version.
    """

    name = "native"

    def __init__(self, library: str, threads: int, vectors: bool = True) -> None:
        self._library = open_library(library)
        self._threads = self._most = threads
        self._vectors = vectors

    def run(self, work: Pass, publish: Any, step: Any = None, peeks: bool = False) -> None:
        """See the base class. The call releases the interpreter lock."""
        if (arguments := work.prepared) is None:
            arguments = work.prepared = _Arguments.over(work, self._vectors)
        key = 0 if step is None else rounding_key(step.step)
        arguments.first = (work.first + key) & WORD
        arguments.steps, arguments.peeks, arguments.threads = step is not None, peeks, self._threads
        arguments.numbers = work.layout.passes.numbers(publish, step)
        getattr(self._library, work.layout.passes.function)(ctypes.byref(arguments))

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        addresses = codes.address, scales.address, values.address
        self._library.dsext_decode(*addresses, codes.numel, block_size, codes.dtype == "uint8")

    def touch(
        self,
        array: Array,
        per_block: int,
        block_size: int,
        chunk_numel: int | None = None,
        touchers: Any = None,
    ) -> None:
        """See the base class.

        Args:
            touchers: ctypes int32 array that receives the thread id for each page; None: not
                wanted.
        """
        block_bytes = per_block * DTYPE_BYTES[array.dtype]
        blocks = max(1, -(-array.nbytes // block_bytes))
        if chunk_numel is not None:
            blocks = min(blocks, chunk_numel // block_size)
        where = array.address, array.nbytes, block_bytes, block_size, blocks
        self._library.dsext_first_touch(*where, self._threads, touchers)

    def limit(self, threads: int) -> None:
        self._threads = max(1, min(threads, self._most))

    def thread_ids(self) -> list[int]:
        """The Linux thread id of each thread. If a limit allows fewer, the calling thread has the
        places of the missing ones, too."""
        numbers = (ctypes.c_int32 * self._threads)()
        self._library.dsext_thread_ids(numbers, self._threads)
        return list(numbers)

    def pin(self, cpus: Sequence[int]) -> None:
        """See the base class. The calling thread is bound to the first CPU.

        Raises:
            OSError: the system refuses it.
        """
        pairs = [*zip(self.thread_ids(), cpus, strict=False)]
        for number, cpu in dict(reversed(pairs)).items():  # a thread's first CPU
            os.sched_setaffinity(number, {cpu})
