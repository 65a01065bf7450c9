"""Crash-safe file operations: when they return, the disk has the result, and no file is ever
partial. Also finds the locks that killed builds of operators have left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

TEMPORARY = ".dsext-tmp"
_CRC = struct.Struct("<I")
_SUM_BYTES = 1 << 20
"""Written and summed in one go, while it is in the core's cache."""
_MOST_REMOVERS = 100
"""Maximum number of times that a folder may change during its removal, because other processes
remove parts of it."""


def sync_file(path: str) -> None:
    """Wait until the disk has the content of a file."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open an existing file; yield its descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def memory_at(address: int, nbytes: int) -> memoryview:
    """The `nbytes` bytes of memory at `address`, for reading."""
    array = (ctypes.c_char * nbytes).from_address(address)
    return memoryview(array).cast("B") if nbytes else memoryview(b"")


def write(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write all bytes of `memory` to a file, beginning at byte `offset`."""
    while memory:
        written = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[written:], offset + written


def write_summed(descriptor: int, memory: memoryview, offset: int, crc: int) -> int:
    """Like `write`; return the running CRC `crc`, continued over `memory`."""
    for begin in range(0, len(memory), _SUM_BYTES):
        part = memory[begin : begin + _SUM_BYTES]
        write(descriptor, part, offset + begin)
        crc = zlib.crc32(part, crc)
    return crc


def write_crc(descriptor: int, crc: int, places: Sequence[int]) -> None:
    """Write a CRC to its places in a zip file."""
    for place in places:
        write(descriptor, memoryview(_CRC.pack(crc)), place)


def read_crc(descriptor: int, place: int) -> int:
    """Read what `write_crc` has written."""
    return int(_CRC.unpack(os.pread(descriptor, _CRC.size, place))[0])


def sync_folder(path: str) -> None:
    """Wait until the disk has the names in a folder; some network file systems do not support this
    and do not need it."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def rename(source: str, target: str) -> None:
    """Rename a file or folder within its folder, durably."""
    os.rename(source, target)
    sync_folder(os.path.dirname(target))


def replace_file(path: str, content: str) -> None:
    """Write a small text file. At any time, even after a crash, which may leave a temporary file
    beside it, `path` has the whole old or a whole new content, also if several processes write."""
    aside = beside(path, uuid.uuid4().hex)
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


def beside(path: str, key: str) -> str:
    """Name of a temporary file beside `path`, which has `TEMPORARY`; `key` tells several apart."""
    return f"{path}{TEMPORARY}.{key}"


def remove_tree(path: str) -> None:
    """Remove a folder with its content, or a link to a folder, if it exists. Several processes may
    remove it at the same time."""
    if os.path.islink(path):
        os.unlink(path)
    for _ in range(_MOST_REMOVERS):
        if not os.path.lexists(path):
            return
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


_OLD_LOCK_SECONDS = 60


def abandoned_locks() -> list[tuple[Path, float]]:
    """Locks of DeepSpeed's operators that are older than a minute, with their age in seconds: torch
    up to 2.13 waits for them forever, silently. One may belong to a long build that still runs.
    None from torch 2.14 on, which locks the file itself: it stays after every build."""
    from torch.utils import cpp_extension  # slow to import

    found, given = [], os.environ.get("TORCH_EXTENSIONS_DIR")
    with contextlib.suppress(OSError):
        for lock in Path(given or cpp_extension.get_default_build_root()).glob("**/lock"):
            age = time.time() - lock.stat().st_mtime
            if age > _OLD_LOCK_SECONDS and hasattr(cpp_extension, "FileBaton"):
                found.append((lock, age))
    return found
