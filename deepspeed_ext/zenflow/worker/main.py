"""Runs the optimizer process:
``python start_process.py MODULE SOCKET_FD ARENA_FD PARENT_PID BY_MAIN_THREAD``.

Started only by `process.OptimizerProcess`. The process binds itself to its cores before it imports
anything heavy, and imports torch only if the native kernel is missing. It ends when the trainer
closes its end of the socket, or dies, whatever it is doing at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.process import end_with_parent
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArrayKey
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.channel import Channel
from deepspeed_ext.zenflow.worker.kernel import Array, Kernel, NativeKernel, Pass, load_kernel
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES, SHOWN_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.messages import (
    ArenaRelay,
    ArenaWrite,
    Done,
    Failed,
    FilePart,
    Ready,
    Span,
    Submission,
    ThreadLimit,
    WorkerPlan,
    WorkerTask,
)

__all__ = ["block_bytes", "main", "write_from_arena"]

PER_BLOCK = ("block_means", "known", "m_scales", "v_scales")
"""Kinds of arrays with one or more values per block."""

_WATCH_SECONDS = 0.2


def main() -> None:
    """Serve one trainer until it closes the connection."""
    socket_fd, arena_fd, parent_pid, by_main_thread = map(int, sys.argv[1:5])
    _end_with_parent(parent_pid, bool(by_main_thread))
    # Launchers and schedulers signal all processes of a job at once. Leave it to the trainer, which
    # may still save with this process, and then closes it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=socket_fd))
    # If the trainer has died, there is no one to report to.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(channel, arena_fd)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:
            _say(channel, Failed(traceback.format_exc()))
            raise SystemExit(1) from None


def _end_with_parent(parent_pid: int, by_main_thread: bool) -> None:
    """Let the kernel kill this process when the thread that started it dies. If that is not the
    trainer's main thread, which lives longest, poll instead."""
    if by_main_thread:
        end_with_parent()
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the trainer died before the lines above ran
        raise SystemExit(0)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_SECONDS)
    os._exit(0)


def _serve(channel: Channel, arena_fd: int) -> None:
    plan: WorkerPlan = _next(channel)
    placement = plan.placement
    warning = placement.bind_process() if placement is not None else None
    kernel = load_kernel(plan.library, plan.threads)
    if (
        placement is not None
        and placement.pin_each_thread
        and warning is None
        and isinstance(kernel, NativeKernel)
    ):
        kernel.pin(sorted(placement.cpus))
    arena = Arena(arena_fd, plan.layout)
    arena.close()  # the mapping outlives the descriptor
    _touch(arena, kernel, [spec.key for spec, _ in plan.layout.arrays if spec.touched], plan)
    _say(channel, Ready(os.getpid(), kernel.name, tuple(sorted(os.sched_getaffinity(0))), warning))
    while True:
        submission: Submission = _next(channel)
        _say(channel, _carry_out(submission, arena, kernel, plan))


def _next(channel: Channel) -> Any:
    """Wait for the next message without a time limit: if the trainer goes away, its end of the
    socket closes."""
    while (message := channel.first()) is None:
        channel.idle()
    channel.drop_first()
    return message


def _say(channel: Channel, message: Ready | Done | Failed) -> None:
    channel.put(message)
    channel.flush()
    while not channel.is_flushed:
        channel.idle()
        channel.flush()


def _touch(arena: Arena, kernel: Kernel, keys: Sequence[ArrayKey], plan: WorkerPlan) -> None:
    for key in keys:
        if isinstance(kernel, NativeKernel):
            array = arena.array(*key)
            nbytes = array.numel * DTYPE_BYTES[array.dtype]
            if array.numel:
                per_block = block_bytes(arena, key, plan.block_size)
                chunk = None if plan.chunk_numel is None else plan.chunk_numel // plan.block_size
                kernel.first_touch(
                    array.address,
                    nbytes,
                    block_bytes=per_block,
                    block_size=plan.block_size,
                    blocks_per_chunk=None if key.partition == OF_CHUNKS else chunk,
                )
        else:
            arena.tensor(*key).neg_().neg_()  # writes to every page without changing values


def block_bytes(arena: Arena, key: ArrayKey, block_size: int) -> int:
    """Bytes per block of an array of the arena, whether it has values per element or per block."""
    array = arena.array(*key)
    itemsize = DTYPE_BYTES[array.dtype]
    if key.partition == OF_CHUNKS:
        return block_size * itemsize
    numel = arena.array("p", key.partition).numel
    is_of_elements = array.numel == numel and key.kind not in PER_BLOCK
    return itemsize * (
        block_size if is_of_elements else array.numel // max(1, -(-numel // block_size))
    )


def _carry_out(submission: Submission, arena: Arena, kernel: Kernel, plan: WorkerPlan) -> Done:
    seconds, failed_write, block_size = 0.0, None, plan.block_size
    for work in submission.tasks:
        begin = time.perf_counter()
        if isinstance(work, ArenaWrite):
            failed_write = failed_write or write_from_arena(work, arena, kernel, block_size)
            continue
        if isinstance(work, ArenaRelay):
            arena.relay(work.layout)
            continue
        if isinstance(work, ThreadLimit):
            if isinstance(kernel, NativeKernel):
                kernel.limit(work.threads)
            continue
        kernel.run(_pass(work, arena, plan))
        seconds += time.perf_counter() - begin
    return Done(submission.number, seconds, failed_write)


def write_from_arena(
    work: ArenaWrite, arena: Arena, kernel: Kernel | None = None, block_size: int = 1
) -> str | None:
    """Write a file's parts; return the error as text, or None.

    Args:
        kernel: decodes moments; None: no part needs it.
        block_size: elements of a block of moments.
    """
    try:
        with files.opened(work.path, os.O_RDWR) as descriptor:
            for part in work.parts:
                crc = files.read_crc(descriptor, part.crc_offsets[0]) if part.continues else 0
                if part.codes is not None:
                    assert kernel is not None, "codes need a kernel"
                    crc = _write_moments(descriptor, part, arena, kernel, block_size, crc)
                else:
                    memory = files.memory_at(arena.address + part.begin, part.nbytes)
                    crc = files.write_summed(descriptor, memory, part.offset, crc)
                files.write_crc(descriptor, crc, part.crc_offsets)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write_moments(
    descriptor: int, part: FilePart, arena: Arena, kernel: Kernel, block_size: int, crc: int
) -> int:
    """Decode moments to fp32 and write them, chunk by chunk; return `crc` updated with them."""
    assert part.codes is not None
    (kind, partition), size = part.codes, DTYPE_BYTES["float32"]
    codes = arena.whole_array(kind, partition)
    scales = arena.whole_array(f"{kind}_scales", partition)
    first, last = part.begin // size, (part.begin + part.nbytes) // size
    step = chunk_of(SHOWN_NUMEL, block_size)
    chunk = (ctypes.c_float * min(step, last - first))()
    for begin in range(first, last, step):
        end = min(begin + step, last)
        values = Array(ctypes.addressof(chunk), "float32", end - begin)
        of_blocks = scales.part(begin // block_size, -(-end // block_size))
        kernel.decode(codes.part(begin, end), of_blocks, block_size, values)
        memory = files.memory_at(values.address, size * values.numel)
        crc = files.write_summed(descriptor, memory, part.offset + size * (begin - first), crc)
    return crc


def _pass(work: WorkerTask, arena: Arena, plan: WorkerPlan) -> Pass:
    """The task's arrays: those of its span."""
    layout, partition, size = plan.state, work.partition, plan.block_size
    p = arena.array("p", partition)
    span = work.span or Span(0, p.numel)
    kind, width = layout.per_block[0], layout.per_block_width(size)

    def of_blocks(kind: str, width: int = 1) -> Array:
        first, last = span.begin // size, -(-span.end // size)
        return arena.array(kind, partition).part(first * width, last * width)

    def passing(kind: str) -> Array:
        """Of a gradient or y."""
        slot = work.peek_slot if kind == "y" and work.peek_slot is not None else work.chunk_slot
        if slot is not None:
            return arena.array(kind, OF_CHUNKS, slot).part(0, span.numel)
        return arena.array(kind, partition, work.slot).part(*span)

    return Pass(
        layout,
        (
            *(arena.array(each, partition).part(*span) for each in layout.kinds),
            *map(of_blocks, layout.scales),
        ),
        passing("y"),
        size,
        work.publish,
        None if work.step is None else passing("g"),
        work.step,
        of_blocks(kind, width) if arena.has(kind, partition) else None,
        arena.before("p", partition) + span.begin,
        peeks=work.peek_slot is not None,
    )
