"""Removes locks that killed builds of DeepSpeed's operators, or torch from 2.14 on, have left: an
older torch would wait for them for ever."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def remove_stale_locks(root: Path) -> None:
    """Remove the locks below `root`, a folder of compiled operators that only this host uses, but
    those in use."""
    locks = list(root.glob("**/lock"))
    held = open_files() if locks else set()
    for lock in locks:
        if str(lock.resolve()) not in held:
            sys.stderr.write(f"note: removing {lock}, which no build holds\n")
            lock.unlink(missing_ok=True)


def open_files() -> set[str]:
    """Paths of the files that processes of this user hold open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(link))
    return found
