"""Transfers whole messages between two processes over a socket. Only `Channel.idle` ever blocks.

A message is a header with a mark and a length, followed by a pickle. Importing this module does not
import torch.
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
_SHARED_SLICE_SECONDS = 0.01
_GRACE_SECONDS = 10.0


class GarbledError(Exception):
    """The received bytes are not a message."""


class Patience:
    """A timeout counted in slices, which ignores time during which the process was suspended.

    When a job is suspended or a machine sleeps, both processes stop while the clock runs on. A
    slice that took much longer than intended counts as such a gap: it does not use up the timeout,
    and at least 10 seconds remain for the other process to resume.

    Args:
        seconds: the whole timeout; may be infinite. NaN counts as expired.
        within: an outer timeout that runs at the same time, unaffected by `renew`; when it expires,
            so does this one.
    """

    def __init__(self, seconds: float, within: Patience | None = None) -> None:
        self.seconds = seconds
        self._left = seconds
        self._within = within
        self._begin = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the timeout has expired."""
        return not self._left > 0 or (self._within is not None and self._within.is_over)

    def renew(self) -> None:
        """Restart the timeout, because there was progress."""
        self._left = self.seconds

    def begin_slice(self, longest: float = _SLICE_SECONDS) -> float:
        """Start a slice; return its length in seconds."""
        self._begin = time.monotonic()
        longest = longest if self._within is None else self._within.begin_slice(longest)
        return min(self._left, longest)

    def end_slice(self) -> None:
        """End the slice and count it."""
        if self._within is not None:
            self._within.end_slice()
        passed = time.monotonic() - self._begin
        if passed > 2 * _SLICE_SECONDS:
            self._left = max(self._left, _GRACE_SECONDS)
        else:
            self._left -= passed


class Channel:
    """One end of a connection; the other end is a `Channel` too.

    Read incoming messages with `first` and remove them with `drop_first`: a message whose handling
    was interrupted by a signal handler's exception is then still there.

    Args:
        end: a connected stream socket; the channel takes ownership.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._unread = bytearray()

    @property
    def is_flushed(self) -> bool:
        """Whether everything passed to `put` has been sent."""
        return not self._unsent

    def put(self, message: Any) -> None:
        """Queue `message` for `flush`."""
        body = pickle.dumps(message)
        self._unsent += _HEADER.pack(_MARK, len(body)) + body

    def flush(self) -> None:
        """Send as much as the socket accepts.

        Raises:
            OSError: the other end is gone.
        """
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._end.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]

    def first(self) -> Any | None:
        """The first message that has arrived and was not dropped; None if there is no complete one.

        Raises:
            EOFError, OSError: the other end is gone, and no complete message is left.
            GarbledError: the received bytes are not a message.
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
        except Exception as error:  # unpickling can raise anything
            raise GarbledError(f"{type(error).__name__}: {error}") from error

    def drop_first(self) -> None:
        """Remove the message that `first` returned."""
        del self._unread[: self._first_size()]

    def _first_is_whole(self) -> bool:
        return len(self._unread) >= _HEADER.size and len(self._unread) >= self._first_size()

    def _first_size(self) -> int:
        """Bytes of the first message including its header, which must have arrived."""
        mark, length = _HEADER.unpack_from(self._unread)
        if mark != _MARK or length > _LONGEST_BYTES:
            raise GarbledError(
                f"not the header of a message: {bytes(self._unread[: _HEADER.size])!r}"
            )
        return _HEADER.size + length

    def idle(self, patience: Patience | None = None, *, is_shared: bool = False) -> None:
        """Block until unsent bytes can be sent or, if there are none, something can be read; at
        most for one slice of `patience`. The slice is short if another thread also reads
        (`is_shared`), because that thread may take the message that this one waits for."""
        poller = select.poll()
        with contextlib.suppress(ValueError):  # closed by another thread; the caller will notice
            poller.register(self._end, select.POLLIN if self.is_flushed else select.POLLOUT)
        if patience is None:
            poller.poll()
        else:
            poller.poll(
                patience.begin_slice(_SHARED_SLICE_SECONDS if is_shared else _SLICE_SECONDS) * 1000
            )
            patience.end_slice()

    def close(self) -> None:
        """Close the connection. The other end notices even if a forked process holds a copy of the
        socket."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def above_standard(descriptor: int) -> int:
    """Return `descriptor`, or a copy above 2 that replaces it.

    A process started with a closed stdin gets descriptor 0 for the next file that it opens. A child
    that inherits this number would find its own stdin there instead.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)
