"""Checks output files named by a user before work begins, and writes them without damage to
existing files."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.errors import ConfigError

__all__ = ["OutputFile"]


@dataclass(frozen=True)
class OutputFile:
    """An output file. A regular or absent file is replaced as a whole; a device or a FIFO is
    written in place.

    Symbolic links are followed: a link stays, and its target is written.
    """

    path: Path
    in_place: bool = False
    """Whether `path` is written in place, because it is not a regular file or its folder is not
    writable."""

    @classmethod
    def check(cls, path: Path | str, name: str) -> "OutputFile":
        """Check that `path` can be written.

        Args:
            name: the user's name for it in messages, such as ``--output``.

        Raises:
            ConfigError: `path` is a directory or cannot be written, or its folder does not exist.
        """
        try:
            return cls._examine(os.fspath(path))
        except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
            raise ConfigError(f"{name} {os.fspath(path)!r} cannot be written: {error}") from None

    @classmethod
    def _examine(cls, path: str) -> "OutputFile":
        resolved = Path(os.path.realpath(path))
        if not os.path.lexists(resolved.parent):
            raise FileNotFoundError(
                errno.ENOENT, "its folder does not exist; create it first", str(resolved.parent)
            )
        replaceable = os.access(resolved.parent, os.W_OK | os.X_OK)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            if replaceable and path:
                return cls(resolved)
            raise
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if stat.S_ISREG(mode) and replaceable:
            return cls(resolved)
        return cls(Path(path), in_place=True)

    def write(self, content: bytes) -> None:
        """Write `content`. A replaced file is complete at any time, old or new, and keeps its mode.

        Raises:
            OSError: the file could not be written, for example a FIFO without a reader.
        """
        if self.in_place:
            # Without O_NONBLOCK, opening a FIFO without a reader would wait for one.
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as file:
                file.write(content)
            return
        scratch = self.path.with_name(f".{secrets.token_hex(8)}.tmp")
        with contextlib.ExitStack() as on_failure:
            with open(scratch, "xb") as file:
                on_failure.callback(scratch.unlink, missing_ok=True)
                file.write(content)
            if self.path.exists():
                shutil.copymode(self.path, scratch)
            scratch.replace(self.path)
            on_failure.pop_all()
