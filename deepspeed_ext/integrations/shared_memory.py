"""Hands tensors to another process of this host through shared memory.

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

from deepspeed_ext.errors import StateError

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
        StateError: the other process has ended, or closed its end, before it had read everything.
    """
    if connection is None:
        for _ in weights:
            pass
        return
    sender = _Sender(connection, bucket_bytes)
    try:
        for name, tensor in weights:
            sender.add(name, tensor)
        sender.flush()
        connection.send((_END, None))
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise StateError(
            "the process that receives the weights has ended or closed the connection: start it "
            "again and hand over all weights"
        ) from error
    except BaseException:
        with suppress(OSError):
            connection.send((_BROKEN, None))
        raise


def receive(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that another process hands over.

    A tensor is a view of shared memory, valid until the next iteration: copy what you keep, as an
    inference engine does when it loads weights. Names of one tensor share it. Iterate to the end.

    Args:
        connection: the other end of `hand_over`'s connection.

    Raises:
        StateError: the other process ended, or failed, before it had handed over everything.
    """
    memory, reads = _NO_MEMORY, False
    try:
        while (message := connection.recv())[0] != _END:
            kind, content = message
            if kind == _BROKEN:
                raise StateError(
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
        raise StateError(
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


class _Sender:
    """Fills the shared memory and tells the reader what is in it."""

    def __init__(self, connection: Connection, bucket_bytes: int) -> None:
        self._connection = connection
        self._bucket_bytes = bucket_bytes
        self._memory = _NO_MEMORY
        self._places: list[tuple[Any, ...]] = []
        self._last: torch.Tensor | None = None
        self._end = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor is self._last:  # tied
            self._places.append((name, *self._places[-1][1:]))
            return
        self._last = tensor
        if self._end + tensor.nbytes > self._memory.numel():
            self.flush()
        if tensor.nbytes > self._memory.numel():
            self._allocate(max(self._bucket_bytes, tensor.nbytes))
        place = self._memory[self._end : self._end + tensor.nbytes]
        place.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        self._places.append((name, tensor.dtype, tuple(tensor.shape), self._end, tensor.nbytes))
        self._end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _allocate(self, nbytes: int) -> None:
        fileno = os.memfd_create("deepspeed_ext-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fileno, nbytes)
            self._connection.send((_MEMORY, nbytes))
            reduction.send_handle(self._connection, fileno, os.getpid())
            self._memory = _mapped(os.dup(fileno), nbytes)
        finally:
            os.close(fileno)

    def flush(self) -> None:
        """Send what the memory holds, and wait until the reader has read it."""
        if self._places:
            self._connection.send((_TENSORS, self._places))
            if self._connection.recv() != _READ:
                raise StateError(
                    "the process that receives the weights has stopped before the last: iterate "
                    "over receive(...) to the end"
                )
        self._places, self._end = [], 0
