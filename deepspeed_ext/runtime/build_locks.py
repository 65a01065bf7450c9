"""Locks that killed builds of DeepSpeed's operators have left. torch waits for them forever, without a message."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["abandoned", "operator_folder"]

BETWEEN_COMPILERS_SECONDS = 60
"""A build may have no compiler running for a moment; a lock younger than this may be of such a build."""


def operator_folder() -> Path:
    """The folder in which torch compiles operators, one folder an operator."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # a user may have no home
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")


def abandoned() -> list[Path]:
    """Locks of builds that no process of this host works on; a build of another host that shares the folder is one.

    Empty if the folder or the processes cannot be read: no start may fail for a warning.
    """
    now = time.time()
    try:
        locks = [path for path in operator_folder().glob("**/lock") if _age(path, now) > BETWEEN_COMPILERS_SECONDS]
        busy = _working_folders() if locks else set()
        return [path for path in locks if path.parent.resolve() not in busy]
    except (OSError, psutil.Error):
        return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:  # released meanwhile
        return 0.0


def _working_folders() -> set[Path]:
    """Where the processes that this one may look at work; compilers work in their operator's folder."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(Path(process.cwd()))
        except (psutil.Error, OSError):
            continue
    return found
