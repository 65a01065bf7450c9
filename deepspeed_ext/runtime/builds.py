"""Finds locks that killed builds of DeepSpeed's operators have left: torch up to 2.13 waits for
them forever, silently."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["abandoned_locks", "operator_folder"]

BETWEEN_COMPILERS_SECONDS = 60
"""A build may have no compiler running for a moment, so a lock younger than this may still be in
use."""


def operator_folder() -> Path:
    """The folder in which torch compiles operators, in one folder per operator."""
    # a user may have no home
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")


def waits_for_files() -> bool:
    """Whether a build waits as long as a lock file exists. From 2.14 on, torch locks the file
    itself, which stays after every build and blocks nothing."""
    try:
        from torch.utils import cpp_extension
    except ImportError:
        return True
    return hasattr(cpp_extension, "FileBaton")


def abandoned_locks() -> list[Path]:
    """Locks that block builds and belong to no process of this host. One may be of a running build
    on another host that shares the folder.

    Empty if the folder or the processes cannot be read, so that the check fails no start.
    """
    now = time.time()
    try:
        locks = [
            path
            for path in operator_folder().glob("**/lock")
            if _age(path, now) > BETWEEN_COMPILERS_SECONDS
        ]
        if not locks or not waits_for_files():
            return []
        busy = _working_folders()
        return [path for path in locks if path.parent.resolve() not in busy]
    except (OSError, psutil.Error):
        return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:  # released meanwhile
        return 0.0


def _working_folders() -> set[Path]:
    """Working folders of all visible processes; compilers run in their operator's folder."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(Path(process.cwd()))
        except (psutil.Error, OSError):
            continue
    return found
