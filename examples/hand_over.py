"""Hands tensors to another process of this host through shared memory, such as a trainer's weights
to an inference engine. Copy this file: it needs nothing but torch.

The memory is a memfd of one bucket, which both processes map and use again and again. It has no
name, so that nothing is left in /dev/shm however either process ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["hand_over", "receive"]

_ALIGNMENT = 64
_NO_MEMORY = torch.empty(0, dtype=torch.uint8, device="cpu")
_MEMORY, _TENSORS, _END, _BROKEN, _READ = "memory", "tensors", "end", "broken", "read"
"""Kinds of messages. The reader sends two of them: `_READ` when it has read the bucket, `_BROKEN`
if it stops early."""


def hand_over(
    weights: Iterable[tuple[str, torch.Tensor]],
    connection: Connection | None,
    bucket_bytes: int = 1 << 28,
) -> None:
    """Copy tensors to another process, which calls `receive`, and wait until it has read them.

    Args:
        weights: names and host tensors, such as `deepspeed_ext.weights(engine)`.
        connection: to the other process, not used for anything else meanwhile: an end of
            ``multiprocessing.Pipe()``, or a connection accepted by an AF_UNIX ``Listener``. None on
            a rank that gets no weights: it only iterates.
        bucket_bytes: size of the shared memory; a larger tensor enlarges it.

    Raises:
        RuntimeError: the other process has ended, or closed its end, before it had read everything.
    """
    if connection is None:
        for _ in weights:
            pass
        return
    memory, places, last, end = _NO_MEMORY, list[tuple[Any, ...]](), None, 0

    def flush() -> None:
        """Send what the memory holds, and wait until the reader has read it."""
        if places:
            connection.send((_TENSORS, places))
            if connection.recv() != _READ:
                raise RuntimeError(
                    "the process that receives the weights has stopped before the last: iterate "
                    "over receive(...) to the end"
                )
            places.clear()

    try:
        for name, tensor in weights:
            if tensor is last:  # tied
                places.append((name, *places[-1][1:]))
                continue
            last = tensor
            if end + tensor.nbytes > memory.numel():
                flush()
                end = 0
            if tensor.nbytes > memory.numel():
                memory = _shared(connection, max(bucket_bytes, tensor.nbytes))
            place = memory[end : end + tensor.nbytes]
            place.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            places.append((name, tensor.dtype, tuple(tensor.shape), end, tensor.nbytes))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        flush()
        connection.send((_END, None))
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError(
            "the process that receives the weights has ended or closed the connection: start it "
            "again and hand over all weights"
        ) from error
    except BaseException:
        with suppress(OSError):
            connection.send((_BROKEN, None))
        raise


def _shared(connection: Connection, nbytes: int) -> torch.Tensor:
    """New memory, uint8 [nbytes], that the reader maps, too."""
    fileno = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fileno, nbytes)
        connection.send((_MEMORY, nbytes))
        reduction.send_handle(connection, fileno, os.getpid())
        return _mapped(os.dup(fileno), nbytes)
    finally:
        os.close(fileno)


def receive(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that another process hands over.

    A tensor is a view of shared memory, valid until the next iteration: copy what you keep, as an
    inference engine does when it loads weights. Names of one tensor share it. Iterate to the end.

    Args:
        connection: the other end of `hand_over`'s connection.

    Raises:
        RuntimeError: the other process ended, or failed, before it had handed over everything.
    """
    memory, reads = _NO_MEMORY, False
    try:
        while (message := connection.recv())[0] != _END:
            kind, content = message
            if kind == _BROKEN:
                raise RuntimeError(
                    "the process that hands over weights has failed: see the error in its log"
                )
            if kind == _MEMORY:
                memory = _mapped(reduction.recv_handle(connection), content)
                continue
            reads = True
            views: dict[Any, torch.Tensor] = {}
            for name, *place in content:
                dtype, shape, begin, nbytes = place
                values = memory[begin : begin + nbytes].view(dtype).view(shape)
                yield name, views.setdefault(tuple(place), values) if nbytes else values
            reads = False
            connection.send(_READ)
    except EOFError as error:
        raise RuntimeError(
            "the process that hands over weights has ended before the last tensor: see its log"
        ) from error
    finally:
        if reads:
            with suppress(OSError):
                connection.send(_BROKEN)


def _mapped(fileno: int, nbytes: int) -> torch.Tensor:
    """Map a memfd as a 1-D uint8 tensor, and close the descriptor."""
    try:
        return torch.frombuffer(mmap.mmap(fileno, nbytes), dtype=torch.uint8)
    finally:
        os.close(fileno)
