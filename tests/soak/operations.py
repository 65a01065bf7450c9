"""The file operations of this process: counted, and the process killed at a chosen one."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FileOperations"]

AUDITED = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}
WRAPPED = ("fsync", "fdatasync", "write")
"""Functions of `os` that Python does not audit."""
WRITING_FRACTION = 0.3
"""Of the moments: those in the middle of writing a file. torch writes in C++, which Python does not
see."""
WRITTEN_BYTES = 2**20
"""Less than any rank's part of a checkpoint."""


class FileOperations:
    """Counts openings below `folder`, renamings, removals, writes and fsyncs. One per process: its
    hooks stay.

    Attributes:
        count: operations of the last block that was watched; 0: none was.
    """

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self._folder = str(folder)
        self._watching = False
        self._last: int | None = None
        sys.addaudithook(self._audit)
        for name in WRAPPED:
            setattr(os, name, self._counted(getattr(os, name)))

    @contextmanager
    def watch(self, moment: float | None = None) -> Iterator[None]:
        """Count the operations of the block.

        Args:
            moment: in [0, 1): kill this process there. The operations that the block is expected to
                make are those of the block before. None: let it live.
        """
        if moment is not None and moment < WRITING_FRACTION:
            kill_at_size(int(WRITTEN_BYTES * moment / WRITING_FRACTION))
        elif moment is not None:
            self._last = 1 + int(
                self.count * (moment - WRITING_FRACTION) / (1.0 - WRITING_FRACTION)
            )
        self.count, self._watching = 0, True
        try:
            yield
        finally:
            self._watching = False
            if moment is not None:  # there were fewer
                os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._watching and (
            event in AUDITED or (event == "open" and str(args[0]).startswith(self._folder))
        ):
            self._note()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if self._watching:
                self._note()
            return function(*args)

        return counted

    def _note(self) -> None:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_size(nbytes: int) -> None:
    """End this process as soon as a file of its becomes larger."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
