"""Reading the small text files under /sys and /proc, where any of them may be absent."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from deepspeed_ext.affinity.cpulist import parse_cpulist, parse_cpumask

__all__ = ["numbered", "read_cpus", "read_int", "read_text"]

Value = TypeVar("Value")


def read_text(path: Path) -> str | None:
    """The stripped content of ``path``; None where it is absent or unreadable (some sysfs files fail with EIO)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


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
    return _parsed(path, int)


def read_cpus(directory: Path, list_name: str, mask_name: str | None = None) -> frozenset[int] | None:
    """CPUs from the list file, else from the hex mask file, of ``directory``; None where neither can be read."""
    cpus = _parsed(directory / list_name, parse_cpulist)
    if cpus is None and mask_name is not None:
        cpus = _parsed(directory / mask_name, parse_cpumask)
    return cpus


def numbered(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """(number, path) of the entries ``<prefix><number>`` of ``directory``, by number."""
    found = []
    if directory.is_dir():
        for entry in directory.iterdir():
            number = entry.name.removeprefix(prefix)
            if entry.name.startswith(prefix) and number.isdecimal():
                found.append((int(number), entry))
    yield from sorted(found)
