"""Calls the C++ passes (``*.cpp``) through ctypes. Does not import torch, which keeps the worker
small."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_CODES, Array, Pass
from deepspeed_ext.zenflow.worker.kernel.rounding import WORD, rounding_key

__all__ = ["NativeKernel", "open_library"]

ABI_VERSION = 20


def open_library(path: str) -> ctypes.CDLL:
    """Load the library.

    Raises:
        OSError: the file cannot be loaded, or has another version.
    """
    library = ctypes.CDLL(path)
    if library.dsext_version() != ABI_VERSION:
        raise OSError(f"{path} does not have ABI version {ABI_VERSION}: rebuild the native kernel")
    signatures = {
        "dsext_decode": [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_int32],
        "dsext_first_touch": [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 4,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
        ],
        "dsext_passers": [
            ctypes.POINTER(ctypes.c_int32),
            *[ctypes.c_int64] * 2,
            ctypes.c_int32,
        ],
        "dsext_thread_ids": [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


class _Arguments(ctypes.Structure):
    """``Pass`` of passes.h, and after it the optimizer's numbers."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("p", "grad", "published", "per_block")),
        *((name, ctypes.c_void_p * 2) for name in ("moments", "scales")),
        *((name, ctypes.c_int64) for name in ("numel", "block_size")),
        *((name, ctypes.c_int32) for name in ("grad_dtype", "published_dtype", "moment_dtype")),
        *((name, ctypes.c_int32) for name in ("steps", "peeks", "threads", "vectors")),
        ("first", ctypes.c_uint32),
        ("numbers", ctypes.c_float * 16),
    ]

    @classmethod
    def of(cls, work: Pass, threads: int, vectors: bool) -> "_Arguments":
        """The arguments of a pass."""
        grad, kinds = work.grad or work.published, len(work.layout.kinds)
        addresses = tuple(array.address for array in work.state)
        key = 0 if work.step is None else rounding_key(work.step.step)
        return cls(
            *(addresses[0], grad.address, work.published.address),
            None if work.per_block is None else work.per_block.address,
            *(addresses[1:kinds], addresses[kinds:]),
            *(work.numel, work.block_size),
            *(DTYPE_CODES[each.dtype] for each in (grad, work.published, work.state[1])),
            *(work.step is not None, work.peeks, threads, vectors),
            (work.first + key) & WORD,
            work.layout.passes.numbers(work.publish, work.step),
        )


class NativeKernel:
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

    def limit(self, threads: int) -> None:
        """Let later passes run on the first `threads` threads only; results are the same."""
        self._threads = max(1, min(threads, self._most))

    def run(self, work: Pass) -> None:
        """See `Kernel.run`. The call releases the interpreter lock."""
        arguments = _Arguments.of(work, self._threads, self._vectors)
        getattr(self._library, work.layout.passes.function)(ctypes.byref(arguments))

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """See `Kernel.decode`. On the calling thread alone, without the interpreter lock."""
        addresses = codes.address, scales.address, values.address
        self._library.dsext_decode(*addresses, codes.numel, block_size, codes.dtype == "uint8")

    def first_touch(
        self,
        address: int,
        nbytes: int,
        *,
        block_bytes: int = 1,
        block_size: int = 1,
        blocks_per_chunk: int | None = None,
        touchers: Any = None,
    ) -> None:
        """Touch every page of an array on the thread that will process it, which places the page on
        that thread's memory node.

        Args:
            block_bytes: bytes of the array for one block.
            block_size: elements of a block.
            blocks_per_chunk: blocks of a pass; None: one pass goes over all.
            touchers: ctypes int32 array that receives the thread id for each page; None: not
                wanted.
        """
        most = max(1, -(-nbytes // block_bytes))
        blocks = min(blocks_per_chunk or most, most)
        self._library.dsext_first_touch(
            address, nbytes, block_bytes, block_size, blocks, self._threads, touchers
        )

    def passers(self, numel: int, block_size: int) -> list[int]:
        """For each of `numel` elements, the id of the thread on which a pass processes it."""
        found = (ctypes.c_int32 * numel)()
        self._library.dsext_passers(found, numel, block_size, self._threads)
        return list(found)

    def pin(self, cpus: Sequence[int]) -> None:
        """Bind each thread to one of ``cpus``, in order; the calling thread to the first. If a
        limit allows fewer threads, the calling thread does the work of the missing ones, too, on
        its own CPU.

        Raises:
            OSError: the system refuses it.
        """
        numbers = (ctypes.c_int32 * self._threads)()
        self._library.dsext_thread_ids(numbers, self._threads)
        first: dict[int, int] = {}
        for number, cpu in zip(numbers, cpus, strict=False):
            first.setdefault(number, cpu)
        for number, cpu in first.items():
            os.sched_setaffinity(number, {cpu})
