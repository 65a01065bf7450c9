"""Runs passes in chunked torch operations: the fallback of the native kernel, and what tests
compare it with."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from deepspeed_ext.zenflow.worker.kernel.definition import decode
from deepspeed_ext.zenflow.worker.kernel.passes import Array, Kernel, Pass

__all__ = ["ReferenceKernel"]

_START_SECONDS = 60.0
"""Longest time for all threads of a pool to start, on a busy machine."""
# three fp32 arrays and the temporaries of a chunk stay in a core's L2 cache
_CHUNK_NUMEL = 128 * 1024


def as_tensor(array: Array) -> torch.Tensor:
    """View ``array`` as a 1-D CPU tensor. The memory must outlive the tensor."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.address)
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype), count=array.numel)


class ReferenceKernel(Kernel):
    """Runs passes with torch on the CPU, in a pool of ``threads`` threads.

    Each thread processes whole chunks and runs its operations alone: operations split among threads
    would each wait for the slowest thread. Results depend neither on the number of threads nor on
    the chunk size, because every operation is elementwise and chunks end at block boundaries. The
    calling process's number of torch threads does not change.

    Args:
        threads: number of threads.
        chunk_numel: elements per chunk, rounded down to whole blocks, but at least one block.
    """

    name = "reference"

    def __init__(self, threads: int, chunk_numel: int = _CHUNK_NUMEL) -> None:
        self._pool = _undivided_threads(threads)
        self._chunk_numel = chunk_numel

    def run(self, work: Pass) -> None:
        if work.numel == 0:
            return
        block, layout, passes = work.block_size, work.layout, work.layout.passes
        blocks = max(1, self._chunk_numel // block)
        chunk, elements = blocks * block, len(layout.kinds)

        def split(array: Array | None, size: int) -> Sequence[torch.Tensor]:
            return () if array is None else as_tensor(array).split(size)

        arrays = [split(each, chunk) for each in work.state[:elements]]
        arrays += [split(each, blocks) for each in work.state[elements:]]
        published, grads = split(work.published, chunk), split(work.grad, chunk)
        known = None if work.peeks else work.per_block
        per_block = split(known, blocks * layout.per_block_width(block))

        def run_chunk(i: int) -> None:
            with torch.no_grad():
                state = [array[i] for array in arrays]
                if work.peeks:
                    state = [array.clone() for array in state]
                if grads:
                    passes.take_host_step(state, grads[i], work.step, block, work.first + i * chunk)
                known = per_block[i] if per_block else None
                passes.publish(work.publish, state, block, published[i], known)

        list(self._pool.map(run_chunk, range(len(published))))

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        decode(as_tensor(codes), as_tensor(scales), block_size, as_tensor(values))

    def touch(
        self, array: Array, per_block: int, block_size: int, chunk_numel: int | None = None
    ) -> None:
        """See the base class; in the calling thread."""
        as_tensor(array).neg_().neg_()


def _undivided_threads(number: int) -> ThreadPoolExecutor:
    """A pool of `number` running threads, in each of which torch does not split operations.

    OpenMP keeps the limit per thread, but `torch.set_num_threads` also sets the default for future
    threads and MKL's limit. So the old number is restored once every thread of the pool has set its
    limit.
    """
    before = torch.get_num_threads()
    all_limited = threading.Barrier(number + 1, timeout=_START_SECONDS)

    def take_limit() -> None:
        # a thread's first call resets its limit to the default, and would undo the next line later
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_limited.wait()

    pool = ThreadPoolExecutor(number, thread_name_prefix="dsext-pass", initializer=take_limit)
    try:
        # no thread is idle before all pass the barrier, so each call starts a new one
        for _ in range(number):
            pool.submit(int)
        all_limited.wait()
    except RuntimeError:
        # a thread cannot start, or its initializer failed; release those that wait at the barrier
        all_limited.abort()
        raise
    finally:
        torch.set_num_threads(before)
    return pool
