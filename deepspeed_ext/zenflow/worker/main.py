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
from collections.abc import Hashable
from typing import Any

from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.process import end_with_parent
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel import load_kernel
from deepspeed_ext.zenflow.worker.kernel.passes import (
    DTYPE_BYTES,
    SHOWN_NUMEL,
    Array,
    Kernel,
    Pass,
    chunk_of,
)
from deepspeed_ext.zenflow.worker.messages import (
    ArenaRelay,
    ArenaWrite,
    Channel,
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
    worker = _Worker(_next(channel), arena_fd)
    _say(channel, worker.ready)
    while True:
        _say(channel, worker.carry_out(_next(channel)))


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


class _Worker:
    """Binds this process, loads its kernel, maps the arena and touches it; then carries out what
    is submitted.

    Attributes:
        ready: says so.
    """

    def __init__(self, plan: WorkerPlan, arena_fd: int) -> None:
        placement = plan.placement
        warning = placement.bind_process() if placement is not None else None
        self._plan = plan
        self._passes: dict[Hashable, Pass] = {}
        self._kernel = load_kernel(plan.library, plan.threads)
        if placement is not None and placement.pin_each_thread and warning is None:
            self._kernel.pin(sorted(placement.cpus))
        self._arena = Arena(arena_fd, plan.layout)
        self._arena.close()  # the mapping outlives the descriptor
        for spec, _ in plan.layout.arrays:
            if spec.touched and spec.numel:
                array = self._arena.array(*spec.key)
                chunk = None if spec.partition == OF_CHUNKS else plan.chunk_numel
                self._kernel.touch(array, spec.per_block or plan.block_size, plan.block_size, chunk)
        self.ready = Ready(self._kernel.name, warning)

    def carry_out(self, submission: Submission) -> Done:
        """Carry it out, and say that it is done."""
        seconds, failed_write = 0.0, None
        for work in submission.tasks:
            if isinstance(work, WorkerTask):
                begin = time.perf_counter()
                self._kernel.run(self._pass(work), work.publish, work.step, work.peeks)
                seconds += time.perf_counter() - begin
            elif isinstance(work, ArenaWrite):
                failed = write_from_arena(work, self._arena, self._kernel, self._plan.block_size)
                failed_write = failed_write or failed
            elif isinstance(work, ArenaRelay):
                self._arena.relay(work.layout)
                self._passes.clear()
            elif isinstance(work, ThreadLimit):
                self._kernel.limit(work.threads)
        return Done(submission.number, seconds, failed_write)

    def _pass(self, work: WorkerTask) -> Pass:
        """The task's pass. One over the same arrays is kept."""
        over = work.partition, work.slot, work.span, work.chunk_slot, work.step is None
        if (kept := self._passes.get(over)) is not None:
            return kept
        arena, layout, size = self._arena, self._plan.state, self._plan.block_size
        p = arena.spec("p", work.partition)
        span = work.span or Span(0, p.numel)

        def part(kind: str, slot: int = 0) -> Array:
            array = arena.array(kind, work.partition, slot)
            if width := arena.spec(kind, work.partition, slot).per_block:
                return array.part(span.begin // size * width, -(-span.end // size) * width)
            return array.part(*span)

        def passing(kind: str) -> Array:
            """Of a gradient or y."""
            if work.chunk_slot is None or not arena.has(kind, OF_CHUNKS):
                return part(kind, work.slot)
            return arena.array(kind, OF_CHUNKS, work.chunk_slot).part(0, span.numel)

        known = layout.per_block[0]
        self._passes[over] = kept = Pass(
            layout,
            tuple(map(part, layout.kept)),
            passing("y"),
            size,
            None if work.step is None else passing("g"),
            part(known) if arena.has(known, work.partition) else None,
            p.before + span.begin,
        )
        return kept


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
    codes = arena.array(kind, partition, whole=True)
    scales = arena.array(f"{kind}_scales", partition, whole=True)
    first, last = part.begin // size, (part.begin + part.nbytes) // size
    step = chunk_of(SHOWN_NUMEL, block_size)
    chunk = (ctypes.c_float * min(step, last - first))()
    for begin in range(first, last, step):
        end = min(begin + step, last)
        values = Array(ctypes.addressof(chunk), "float32", end - begin)
        of_blocks = scales.part(begin // block_size, -(-end // block_size))
        kernel.decode(codes.part(begin, end), of_blocks, block_size, values)
        memory = files.memory_at(values.address, values.nbytes)
        crc = files.write_summed(descriptor, memory, part.offset + size * (begin - first), crc)
    return crc
