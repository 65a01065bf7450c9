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

from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.process import end_with_parent
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArrayKey
from deepspeed_ext.zenflow.plan.chunks import CODED_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.channel import Channel
from deepspeed_ext.zenflow.worker.kernel import (
    AdamPass,
    Array,
    Kernel,
    LionPass,
    NativeKernel,
    load_kernel,
)
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from deepspeed_ext.zenflow.worker.kernel.rounding import CODE_DTYPES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout
from deepspeed_ext.zenflow.worker.messages import (
    ArenaRelay,
    ArenaTouch,
    ArenaWrite,
    CodedPart,
    Done,
    Failed,
    LionPartitionPass,
    PartitionPass,
    Ready,
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
    placement = WorkerPlacement.parse(plan.placement) if plan.placement is not None else None
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
        if isinstance(work, ArenaTouch):
            _touch(arena, kernel, work.keys, plan)
            continue
        if isinstance(work, ArenaRelay):
            arena.relay(work.layout)
            continue
        if isinstance(work, ThreadLimit):
            if isinstance(kernel, NativeKernel):
                kernel.limit(work.threads)
            continue
        if isinstance(work, PartitionPass):
            kernel.run(_adam_pass(work, arena, block_size))
        else:
            kernel.run_lion(_lion_pass(work, arena, block_size))
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
                if isinstance(part, CodedPart):
                    assert kernel is not None, "codes need a kernel"
                    crc = _write_decoded(descriptor, part, arena, kernel, block_size, crc)
                else:
                    memory = files.memory_at(arena.address + part.begin, part.nbytes)
                    crc = files.write_summed(descriptor, memory, part.offset, crc)
                files.write_crc(descriptor, crc, part.crc_offsets)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write_decoded(
    descriptor: int, part: CodedPart, arena: Arena, kernel: Kernel, block_size: int, crc: int
) -> int:
    """Write moments as fp32, chunk by chunk; return `crc` updated with them."""
    codes = arena.whole_array(part.kind, part.partition)
    scales = arena.whole_array(f"{part.kind}_scales", part.partition)
    step = chunk_of(CODED_CHUNK_NUMEL, block_size)
    chunk = (ctypes.c_float * min(step, part.span.numel))()
    for begin in range(part.span.begin, part.span.end, step):
        end = min(begin + step, part.span.end)
        values = Array(ctypes.addressof(chunk), "float32", end - begin)
        of_blocks = scales.part(begin // block_size, -(-end // block_size))
        kernel.decode(codes.part(begin, end), of_blocks, block_size, values)
        size = DTYPE_BYTES["float32"]
        memory = files.memory_at(values.address, size * values.numel)
        crc = files.write_summed(
            descriptor, memory, part.offset + size * (begin - part.span.begin), crc
        )
    return crc


def _adam_pass(work: PartitionPass, arena: Arena, block_size: int) -> AdamPass:
    p, m, v, published, *grads = _arrays(work, arena, ADAM_STATE)
    means = _per_block(work, arena, "block_means", block_size)
    first = arena.before("p", work.partition) + (0 if work.span is None else work.span.begin)
    scales = None
    if m.dtype == CODE_DTYPES[0]:
        scales = (
            _per_block(work, arena, "m_scales", block_size),
            _per_block(work, arena, "v_scales", block_size),
        )
    return AdamPass(
        p,
        m,
        v,
        tuple(grads),
        work.steps,
        published,
        means,
        block_size,
        work.publish,
        first,
        scales,
        peeks=work.peek_slot is not None,
    )


def _lion_pass(work: LionPartitionPass, arena: Arena, block_size: int) -> LionPass:
    p, m, published, *grads = _arrays(work, arena, LION_STATE)
    width = LION_STATE.per_block_width(block_size)
    known = _per_block(work, arena, "known", block_size, width)
    peeks = work.peek_slot is not None
    return LionPass(
        p, m, tuple(grads), work.steps, published, known, block_size, work.publish, peeks
    )


def _arrays(work: WorkerTask, arena: Arena, state: StateLayout) -> list[Array]:
    """p, the moments, y and the gradients of the task's span."""
    arrays = [arena.array(kind, work.partition) for kind in state.kinds]
    if work.chunk_slot is not None:
        assert work.span is not None
        assert len(work.slots) <= 1, "a chunk has one gradient"
        both = [
            arena.array(kind, OF_CHUNKS, work.chunk_slot)
            for kind in ("y", *("g" for _ in work.slots))
        ]
        return [
            *(array.part(*work.span) for array in arrays),
            *(array.part(0, work.span.numel) for array in both),
        ]
    arrays += [arena.array("y", work.partition, work.y_slot)]
    arrays += [arena.array("g", work.partition, slot) for slot in work.slots]
    if work.span is not None:
        arrays = [array.part(*work.span) for array in arrays]
    if work.peek_slot is not None:
        peeked = arena.array("y", OF_CHUNKS, work.peek_slot)
        arrays[len(state.kinds)] = peeked.part(0, arrays[0].numel)
    return arrays


def _per_block(work: WorkerTask, arena: Arena, kind: str, block_size: int, width: int = 1) -> Array:
    """The task's span of a per-block array with `width` elements per block."""
    whole, span = arena.array(kind, work.partition), work.span
    return (
        whole
        if span is None
        else whole.part(span.begin // block_size * width, -(-span.end // block_size) * width)
    )
