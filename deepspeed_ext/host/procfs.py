"""The only reader of files under /sys, /proc, a user's ``--root`` and the cache: any of them may be absent or anything.

A file that is no regular one (a FIFO, a device, a directory), that is too long or that cannot be read counts as absent.
Opening a FIFO would wait for a writer and a device may be endless, so neither is ever read.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from deepspeed_ext.host.cpulist import parse_cpulist, parse_cpumask

__all__ = ["numbered", "parse_whole", "positive", "read_cpus", "read_int", "read_text"]

Value = TypeVar("Value")

# The kernel's own files have at most a page, lists of many ranks' CPUs in a tuning result a few.
LIMIT_BYTES = 64 << 10
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")  # 64 bits have at most 20 digits
_NUMBER_IN_NAME = re.compile(r"[0-9]{1,9}")


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str | None:
    """The stripped content of a regular file; None if it is absent, unreadable, longer or something else.

    Some sysfs files fail with EIO; bytes that are no text become replacement characters.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError):  # ValueError: the path contains a null byte
        return None
    try:
        content = _read(descriptor, limit_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if content is None else content.decode(errors="replace").strip()


def _read(descriptor: int, limit_bytes: int) -> bytes | None:
    """All that is left to read, None if that is more than `limit_bytes`; procfs hands out a page at a time."""
    content = b""
    while part := os.read(descriptor, limit_bytes + 1 - len(content)):
        content += part
        if len(content) > limit_bytes:
            return None
    return content


def parse_whole(text: str) -> int:
    """The whole number of at most 20 digits that `text` is.

    Raises:
        ValueError: it is none.
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not a whole number of at most 20 digits")
    return int(text)


def positive(text: str) -> int:
    """The number that `text` is; 0 for anything else, such as ``max``."""
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
    """The whole number in ``path``; None where there is none."""
    return _parsed(path, parse_whole)


def read_cpus(directory: Path, list_name: str, mask_name: str | None = None) -> frozenset[int] | None:
    """CPUs from the list file, else from the hex mask file, of ``directory``; None where neither can be read."""
    cpus = _parsed(directory / list_name, parse_cpulist)
    if cpus is None and mask_name is not None:
        cpus = _parsed(directory / mask_name, parse_cpumask)
    return cpus


def numbered(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """(number, path) of the entries ``<prefix><number>`` of ``directory``, by number; none if it cannot be listed."""
    try:
        names = os.listdir(directory)
    except (OSError, ValueError):
        return
    numbers = ((name.removeprefix(prefix), name) for name in names if name.startswith(prefix))
    yield from sorted((int(digits), directory / name) for digits, name in numbers if _NUMBER_IN_NAME.fullmatch(digits))
