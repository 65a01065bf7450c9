"""Calls the C++ passes (``*.cpp``) through ctypes. Does not import torch, which keeps the worker
small."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from deepspeed_ext.zenflow.worker.kernel.passes import Array, Pass

__all__ = ["NativeKernel"]

ABI_VERSION = 18


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
        passes = work.layout.passes
        arguments = passes.arguments(work)
        arguments.fill(work, self._threads, self._vectors)
        getattr(self._library, passes.function)(ctypes.byref(arguments))

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
