"""Chooses the remedy for an error of a save by its cause, not by the call that failed."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime.words import one_line

__all__ = ["BY_NUMBER", "OTHERWISE", "THREADS", "advised", "remedy_for"]

_ROOM = "make room, or save elsewhere"
_PERMISSION = "let this user write there, or save elsewhere"
_FILES = "raise the limit on open files (ulimit -n), or close some"
THREADS = (
    "allow this user more threads and processes (ulimit -u, pids.max of the container), or end some"
)
_MEMORY = "free host memory, or raise its limit (ulimit -v, the container's)"
_DEVICE = "check the disk or its server (dmesg), or save elsewhere"
_GONE = "do not remove or rename the folder during a save"
_PLACE = "save elsewhere or under another tag"
OTHERWISE = _ROOM

BY_NUMBER: dict[int, str] = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: "raise this user's quota, remove older checkpoints, or save elsewhere",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save elsewhere",
    errno.EROFS: "mount it writable (a file system turns read-only "
    "after an error: dmesg), or save elsewhere",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EMFILE: _FILES,
    errno.ENFILE: "raise the host's limit on open files (fs.file-max), or close some",
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: THREADS,
    errno.EIO: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ENODEV: _DEVICE,
    errno.ESTALE: _DEVICE,
    errno.ENOTCONN: _DEVICE,
    errno.ETIMEDOUT: _DEVICE,
    errno.EREMOTEIO: _DEVICE,
    errno.EBUSY: _DEVICE,
    errno.ENOENT: _GONE,
    errno.EEXIST: _PLACE,
    errno.ENOTEMPTY: _PLACE,
    errno.ENOTDIR: _PLACE,
    errno.EISDIR: _PLACE,
    errno.EXDEV: _PLACE,
    errno.ELOOP: _PLACE,
    errno.EINVAL: _PLACE,
    errno.ENOTSUP: _PLACE,
    errno.ENAMETOOLONG: "use a shorter tag or folder",
    errno.EMLINK: "remove older checkpoints, or save elsewhere",
}
"""Remedy by the error number of an `OSError`."""

_BY_TEXT: tuple[tuple[str, str], ...] = (
    ("can't start new thread", THREADS),
    ("MemoryError", _MEMORY),
    ("not enough memory", _MEMORY),
    ("out of memory", _MEMORY),
    ("pickle", "give save_checkpoint a client_state that pickle can store"),
)
"""Remedies for other errors, by a part of their type and text."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def remedy_for(said: str, otherwise: str = OTHERWISE) -> str:
    """The remedy for an error of a save, perhaps of another process.

    Args:
        said: type and text of the error.
        otherwise: the remedy for unknown errors.
    """
    if (found := _ERRNO.search(said)) is not None:
        return BY_NUMBER.get(int(found[1]), otherwise)
    return next((remedy for part, remedy in _BY_TEXT if part.lower() in said.lower()), otherwise)


@contextmanager
def advised() -> Iterator[None]:
    """Add the remedy to an error of the block.

    Raises:
        CheckpointError: for any error, except our own errors that already contain a remedy.
    """
    try:
        yield
    except DeepSpeedExtError:
        raise
    except Exception as error:
        said = one_line(error)
        raise CheckpointError(f"{said}. To go on: {remedy_for(said)}") from error
