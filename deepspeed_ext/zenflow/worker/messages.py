"""The protocol between trainer and worker: the messages, which are plain values that pickle; the
channel that transfers them over a socket; and how long one may wait for an answer.

On the socket a message is its length, followed by a pickle. Only
`Channel.idle` ever blocks. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from deepspeed_ext.cores.host import WorkerPlacement
from deepspeed_ext.zenflow.plan.arrays import ArenaLayout
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 16
_SLICE_SECONDS = 0.01
"""Short, because another thread may take the answer that one waits for."""
_SUSPENDED_SECONDS = 1.0
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker needs to start; sent once."""

    layout: ArenaLayout
    state: StateLayout
    """The optimizer's, with its passes."""
    block_size: int
    placement: WorkerPlacement | None
    """Its cores; None: inherited."""
    threads: int
    library: str | None
    """Path of the native kernel; None: the torch reference."""
    chunk_numel: int | None = None
    """Elements of the largest pass; None: passes take whole partitions."""


class Span(NamedTuple):
    """A run of whole blocks of a partition."""

    begin: int
    """Its first element, a multiple of the block size."""
    end: int
    """The element after its last one: a multiple of the block size, or n."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class WorkerTask:
    """One pass over one partition: a step with the gradient in a slot, then y in its place."""

    partition: int
    slot: int
    """Slot of the gradient and of y. Without a step its gradient, handed over before, is lost."""
    publish: Any
    """What y is, as the optimizer's `kernel.passes.Passes` takes it."""
    step: Any = None
    """The constants of the step; None: only compute y again."""
    span: Span | None = field(default=None, kw_only=True)
    """The part to process; None: all of it. Parts may be processed in any order, with the same
    result."""
    chunk_slot: int | None = field(default=None, kw_only=True)
    """The chunk slot that holds the part's gradient, if chunk slots are for gradients, and receives
    its y; None: the partition's own slots."""
    peeks: bool = field(default=False, kw_only=True)
    """Whether only y is computed, and nothing else changes; the same task without it follows."""


class FilePart(NamedTuple):
    """Bytes of the arena and their place in a file."""

    begin: int
    """Their first byte in the arena; of moments that the worker decodes, in their fp32 array."""
    nbytes: int
    offset: int
    """Their first byte in the file."""
    crc_offsets: tuple[int, ...] = ()
    """Where in the file the CRC of these bytes belongs."""
    continues: bool = False
    """Whether to continue the CRC that is there already, of the bytes before."""
    codes: tuple[str, int] | None = None
    """Kind and partition of the codes to decode on their way to the file, counted from the
    beginning of ZeRO's partition; None: the bytes are written as they are."""


@dataclass(frozen=True)
class ArenaWrite:
    """Write parts of the arena to an existing file, and the CRCs of records. A failure does not end
    the worker: `Done.failed_write` reports it."""

    path: str
    parts: tuple[FilePart, ...]


@dataclass(frozen=True)
class ArenaRelay:
    """Use this layout of the arena from now on."""

    layout: ArenaLayout


@dataclass(frozen=True)
class ThreadLimit:
    """Run later passes of the native kernel on this many of the `WorkerPlan.threads` threads.
    Results are the same."""

    threads: int


Work: TypeAlias = WorkerTask | ArenaWrite | ArenaRelay | ThreadLimit
"""All that is submitted. Only a `WorkerTask` has a partition."""


@dataclass(frozen=True)
class Submission:
    """Work for the worker, which answers with a `Done` of the same number."""

    number: int
    tasks: tuple[Work, ...]


@dataclass(frozen=True)
class Ready:
    """Sent once the worker has bound itself, mapped and touched the arena, and loaded its
    kernel."""

    kernel: str
    warning: str | None
    """Why its placement was not applied in full; None: it was."""


@dataclass(frozen=True)
class Done:
    """Sent once the arena holds the result of submission `number`, and its files are written."""

    number: int
    seconds: float
    """Duration of the passes."""
    failed_write: str | None = None
    """Why a file could not be written; None: it was."""


@dataclass(frozen=True)
class Failed:
    """Sent when the worker has raised an exception; it then ends."""

    traceback: str


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
        if passed > _SUSPENDED_SECONDS:
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
        self._unsent += _LENGTH.pack(len(body)) + body

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
        """
        with contextlib.suppress(BlockingIOError):
            while self._first_size() is None:
                chunk = self._end.recv(_CHUNK_BYTES)
                if not chunk:
                    raise EOFError
                self._unread += chunk
        size = self._first_size()
        return None if size is None else pickle.loads(self._unread[_LENGTH.size : size])

    def drop_first(self) -> None:
        """Remove the message that `first` returned."""
        del self._unread[: self._first_size()]

    def _first_size(self) -> int | None:
        """Bytes of the first message with its length; None: not all of it has arrived."""
        if len(self._unread) < _LENGTH.size:
            return None
        size: int = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        return size if len(self._unread) >= size else None

    def idle(self, patience: Patience | None = None) -> None:
        """Block until unsent bytes can be sent or, if there are none, something can be read; at
        most for one slice of `patience`."""
        poller = select.poll()
        with contextlib.suppress(ValueError):  # closed by another thread; the caller will notice
            poller.register(self._end, select.POLLIN if self.is_flushed else select.POLLOUT)
        if patience is None:
            poller.poll()
            return
        poller.poll(patience.begin_slice() * 1000)
        patience.end_slice()

    def close(self) -> None:
        """Close the connection. The other end notices even if a forked process holds a copy of the
        socket."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
