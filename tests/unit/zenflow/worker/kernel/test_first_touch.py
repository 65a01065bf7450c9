"""The thread that first touches a page is the one that passes over it, so that its memory is
near."""

from __future__ import annotations

import ctypes
import mmap
import os

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES, Array
from tests.support.kernels import LIBRARY, needs_native

PAGE = 4096
TILE_NUMEL = 256
"""`kTileNumel` of passes.h."""


def touchers_of(
    kernel: NativeKernel,
    start: int,
    dtype: str,
    numel: int,
    per_block: int,
    block_size: int,
    chunk: int | None,
) -> list[int]:
    """The thread that touches each page of an array that begins `start` bytes behind a page."""
    nbytes = start + numel * DTYPE_BYTES[dtype]
    descriptor = os.memfd_create("touched")
    os.ftruncate(descriptor, -(-nbytes // PAGE) * PAGE)
    memory = mmap.mmap(descriptor, 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    found = (ctypes.c_int32 * (len(memory) // PAGE))()
    kernel.touch(Array(address, dtype, numel), per_block, block_size, chunk, found)
    assert os.fstat(descriptor).st_blocks * 512 == len(memory), "pages that nobody has touched"
    assert not memory[:].strip(b"\0"), "an array that a touch has changed"
    os.close(descriptor)
    return list(found)


def passers(ids: list[int], numel: int, block_size: int) -> list[int]:
    """The thread that passes over each element, by the rule of passes.h: whole tiles in equal
    parts, in order; the first ones have one more."""
    tile = -(-TILE_NUMEL // block_size) * block_size
    each, more = divmod(-(-numel // tile), len(ids))
    found = [number for i, number in enumerate(ids) for _ in range((each + (i < more)) * tile)]
    return found[:numel]


@needs_native
@settings(deadline=None)
@given(st.data())
def test_pages_are_touched_by_the_thread_that_passes_over_them(data: st.DataObject) -> None:
    """For every array of a partition: an entry of 1, 2 or 4 bytes for each element, or some for
    each block."""
    block_size = data.draw(st.sampled_from([1, 8, 32, 48, 100, 256, 1000]))
    blocks = data.draw(st.integers(1, max(1, 60_000 // block_size)))
    numel = max(1, blocks * block_size - data.draw(st.integers(0, block_size - 1)))
    chunk = data.draw(st.one_of(st.none(), st.integers(1, blocks)))
    start = data.draw(st.sampled_from([0, 64, 3 * PAGE // 4, PAGE - 4]))
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32"]))
    width = data.draw(st.sampled_from([0, 1, 2, 32]))
    kernel = NativeKernel(str(LIBRARY), data.draw(st.integers(1, 9)))
    expected: list[int] = []
    for begin in range(0, numel, (chunk or blocks) * block_size):
        count = min((chunk or blocks) * block_size, numel - begin)
        expected += passers(kernel.thread_ids(), count, block_size)
    entries, of_chunk = blocks * width or numel, None if chunk is None else chunk * block_size
    how = width or block_size, block_size, of_chunk
    for page, thread in enumerate(touchers_of(kernel, start, dtype, entries, *how)):
        begins = max(0, page * PAGE - start) // DTYPE_BYTES[dtype]  # its first entry
        assert thread == expected[begins // width * block_size if width else begins]
