"""File operations that survive a crash: what has returned is on the disk, and a name never leads to half of a file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

__all__ = ["remove_tree", "rename", "replace_file", "sync_file", "sync_folder"]


def sync_file(path: str) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk; some network file systems have nothing to wait for."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def rename(source: str, target: str) -> None:
    """Give a file or folder another name in the same folder, durably."""
    os.rename(source, target)
    sync_folder(os.path.dirname(target))


def replace_file(path: str, content: str) -> None:
    """Write a small text file. At any moment, and after a crash, `path` holds the old content or all of the new.

    One process at a time may write it.
    """
    aside = f"{path}.dsext-tmp"
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    sync_folder(os.path.dirname(path))


def remove_tree(path: str) -> None:
    """Remove a folder with its content, or a link to one; nothing happens if there is none."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)
