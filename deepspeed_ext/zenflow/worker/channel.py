"""Messages between two processes over a socket: whole ones only, and nothing here ever blocks except `Channel.idle`.

A message is a header, with a mark and a length, and a pickle. Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import socket
import struct
import time
from typing import Any

__all__ = ["Channel", "GarbledError", "Patience", "above_standard"]

_HEADER = struct.Struct("!4sQ")
_MARK = b"dsxt"
_LONGEST_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 16
_SLICE_SECONDS = 0.5
_GRACE_SECONDS = 10.0


class GarbledError(Exception):
    """What has arrived is not a message."""


class Patience:
    """How much longer to wait, counted in slices.

    A suspended job, or a machine that sleeps, stops both processes while the clock runs on. A slice that took far
    longer than it should have was such a gap: it costs nothing, and the other process gets time to run again.

    Args:
        seconds: the whole wait; may be infinite. NaN is over at once.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._begin = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not self._left > 0

    def begin_slice(self) -> float:
        """The length of the next slice, in seconds."""
        self._begin = time.monotonic()
        return min(self._left, _SLICE_SECONDS)

    def end_slice(self) -> None:
        """The slice is over: count it."""
        passed = time.monotonic() - self._begin
        if passed > 2 * _SLICE_SECONDS:
            self._left = max(self._left, _GRACE_SECONDS)
        else:
            self._left -= passed


class Channel:
    """One end of a connection; the other is a `Channel` too.

    Incoming messages are read with `first` and `drop_first`: a message that was handled only in part, because a signal
    handler raised, is still there.

    Args:
        end: a connected stream socket, which the channel owns.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._unread = bytearray()

    @property
    def is_flushed(self) -> bool:
        """Whether everything that was `put` has left."""
        return not self._unsent

    def put(self, message: Any) -> None:
        """Take `message` to be sent by `flush`."""
        body = pickle.dumps(message)
        self._unsent += _HEADER.pack(_MARK, len(body)) + body

    def flush(self) -> None:
        """Send as much as the socket takes.

        Raises:
            OSError: the other end is gone.
        """
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]

    def first(self) -> Any | None:
        """The first message that has arrived and is not dropped; None if there is no whole one.

        Raises:
            EOFError, OSError: the other end is gone, and has left no whole message.
            GarbledError: what has arrived is not a message.
        """
        with contextlib.suppress(BlockingIOError):
            while not self._first_is_whole():
                chunk = self._end.recv(_CHUNK_BYTES)
                if not chunk:
                    raise EOFError
                self._unread += chunk
        if not self._first_is_whole():
            return None
        try:
            return pickle.loads(self._unread[_HEADER.size : self._first_size()])
        except Exception as error:  # unpickling raises whatever the bytes make it raise
            raise GarbledError(f"{type(error).__name__}: {error}") from error

    def drop_first(self) -> None:
        """Go on to the message after `first`."""
        del self._unread[: self._first_size()]

    def _first_is_whole(self) -> bool:
        return len(self._unread) >= _HEADER.size and len(self._unread) >= self._first_size()

    def _first_size(self) -> int:
        """Bytes of the first message with its header, which has arrived."""
        mark, length = _HEADER.unpack_from(self._unread)
        if mark != _MARK or length > _LONGEST_BYTES:
            raise GarbledError(f"a message does not begin with {bytes(self._unread[: _HEADER.size])!r}")
        return _HEADER.size + length

    def idle(self, patience: Patience | None = None) -> None:
        """Wait for room for what is unsent, else for something to read; for a slice of `patience` at most."""
        poller = select.poll()
        with contextlib.suppress(ValueError):  # closed by another thread: the caller will see it
            poller.register(self._end, select.POLLIN if self.is_flushed else select.POLLOUT)
        if patience is None:
            poller.poll()
        else:
            poller.poll(patience.begin_slice() * 1000)
            patience.end_slice()

    def close(self) -> None:
        """Close the connection; the other end sees it even if a forked process holds a copy of the socket."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def above_standard(descriptor: int) -> int:
    """`descriptor`, or a copy in its place above 2.

    A process that was started with a closed stdin gets 0 for the next file that it opens, and a child that is given
    this number finds its own stdin there.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)
