"""Reads files under /sys, /proc, a user's ``--root`` and the cache. Any of them may be absent or
malformed.

A file counts as absent if it is not a regular file (a FIFO, a device, a directory), is too long, or
cannot be read. Opening a FIFO would wait for a writer, and a device may be endless, so neither is
ever read.
"""

import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from deepspeed_ext.runtime.cpulist import parse_cpulist, parse_cpumask

__all__ = ["host_id", "numbered", "parse_whole", "positive", "read_cpus", "read_int", "read_text"]

Value = TypeVar("Value")

# Kernel files that list something for each of thousands of CPUs have a few pages.
LIMIT_BYTES = 64 << 10
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
)
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")  # 64 bits have at most 20 digits
_NUMBER_IN_NAME = re.compile(r"[0-9]{1,9}")


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str | None:
    """Return the stripped content of a regular file; None if it is absent, unreadable, too long or
    not regular.

    Some sysfs files fail with EIO; they count as unreadable. Bytes that are not UTF-8 become
    replacement characters.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError):  # ValueError: the path contains a null byte
        return None
    try:
        content = (
            _read(descriptor, limit_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
        )
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if content is None else content.decode(errors="replace").strip()


def host_id(root: Path | str = "/") -> str:
    """Return a text that the processes of one host share: the kernel's boot id, or the host's name.

    Args:
        root: folder that holds ``proc``.
    """
    return read_text(Path(root, "proc/sys/kernel/random/boot_id")) or socket.gethostname()


def _read(descriptor: int, limit_bytes: int) -> bytes | None:
    """Read to the end of the file; None if that exceeds `limit_bytes`. procfs returns one page per
    read."""
    content = b""
    while part := os.read(descriptor, limit_bytes + 1 - len(content)):
        content += part
        if len(content) > limit_bytes:
            return None
    return content


def parse_whole(text: str) -> int:
    """Parse a whole number of at most 20 digits.

    Raises:
        ValueError: `text` is not such a number.
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not a whole number of at most 20 digits")
    return int(text)


def positive(text: str) -> int:
    """Parse a number; 0 if `text` is negative or anything else, such as ``max``."""
    try:
        return max(0, parse_whole(text))
    except ValueError:
        return 0


def _parsed(path: Path, parse: Callable[[str], Value]) -> Value | None:
    text = read_text(path)
    if not text:
        return None
    try:
        return parse(text)
    except ValueError:
        return None


def read_int(path: Path) -> int | None:
    """Read a whole number from ``path``; None if there is none."""
    return _parsed(path, parse_whole)


def read_cpus(
    directory: Path, list_name: str, mask_name: str | None = None
) -> frozenset[int] | None:
    """Read CPUs from the list file, or else the hex mask file, of ``directory``; None if neither
    can be read."""
    cpus = _parsed(directory / list_name, parse_cpulist)
    if cpus is None and mask_name is not None:
        cpus = _parsed(directory / mask_name, parse_cpumask)
    return cpus


def numbered(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield (number, path) of each entry ``<prefix><number>``, by number; nothing if ``directory``
    cannot be listed."""
    try:
        names = os.listdir(directory)
    except (OSError, ValueError):
        return
    numbers = ((name.removeprefix(prefix), name) for name in names if name.startswith(prefix))
    yield from sorted(
        (int(digits), directory / name)
        for digits, name in numbers
        if _NUMBER_IN_NAME.fullmatch(digits)
    )
