"""The two ways in which Linux writes a set of CPUs: the list ``0,4-11`` and the hex mask ``00000ff1``."""

import re
from collections.abc import Iterable

__all__ = ["format_cpulist", "parse_cpulist", "parse_cpumask"]

# Linux itself stops at 8192; the bound keeps a typing error such as 0-4000000000 from eating the memory.
MAX_CPU_ID = (1 << 16) - 1

_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)(?:/(\d+))?)?)?")


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs of a list such as ``0,4-11``, ``0-31:2/8`` (kernel: two of each eight) or ``0-31:2`` (taskset: each second).

    Empty text is the empty set, as in the kernel's own files.

    Raises:
        ValueError: the text is not a CPU list; the message quotes the item.
    """
    cpus: set[int] = set()
    text = text.strip()
    for item in text.split(",") if text else ():
        cpus.update(_expand(item.strip()))
    return frozenset(cpus)


def _expand(item: str) -> Iterable[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is not a CPU number or range (write for example 0,4-11)")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ValueError(f"the range {item!r} runs backwards")
    if last > MAX_CPU_ID:
        raise ValueError(f"CPU {last} in {item!r} is beyond the highest supported number {MAX_CPU_ID}")
    if match[3] is None:
        return range(first, last + 1)
    used, group = (int(match[3]), int(match[4])) if match[4] else (1, int(match[3]))
    if not 0 < used <= group:
        raise ValueError(f"{item!r}: a group takes at least one CPU and at most its own size")
    return (cpu for cpu in range(first, last + 1) if (cpu - first) % group < used)


def parse_cpumask(text: str) -> frozenset[int]:
    """CPUs of a hex mask in groups of 32 bits, most significant first: ``00000001,00000ff1``.

    Raises:
        ValueError: the text is not a hex mask.
    """
    mask = 0
    for group in text.strip().split(","):
        mask = (mask << 32) | int(group, 16)
    return frozenset(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def format_cpulist(cpus: Iterable[int]) -> str:
    """The shortest list that `parse_cpulist` reads back as ``cpus``: ``0,4-11``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
