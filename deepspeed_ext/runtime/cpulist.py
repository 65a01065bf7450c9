"""Parses and writes Linux CPU sets: the list ``0,4-11`` and the hex mask ``00000ff1``."""

import re
from collections.abc import Iterable

__all__ = ["format_cpulist", "parse_cpulist", "parse_cpumask", "MAX_CPU_ID"]

# Linux supports at most 8192 CPUs. The bound keeps a typing
# error such as 0-4000000000 from filling the memory.
MAX_CPU_ID = (1 << 16) - 1

# Without a limit, a file of 64 KiB could name every CPU thousands of times.
_MAX_NAMED = 16 * (MAX_CPU_ID + 1)
_NUMBER = "([0-9]{1,9})"
_ITEM = re.compile(f"{_NUMBER}(?:-{_NUMBER}(?::{_NUMBER}(?:/{_NUMBER})?)?)?")
_MASK = re.compile("[0-9a-f]{1,8}(?:,[0-9a-f]{1,8})*", re.IGNORECASE)


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list such as ``0,4-11``, ``0-31:2/8`` (kernel: 2 of every 8) or ``0-31:2``
    (taskset: every second).

    Empty text is the empty set, as in the kernel's own files.

    Raises:
        ValueError: the text is not a CPU list; the message quotes the wrong item.
    """
    cpus: set[int] = set()
    named = 0
    text = text.strip()
    for item in text.split(",") if text else ():
        span, used, group = _parse_item(item.strip())
        named += len(span)
        if named > _MAX_NAMED:
            raise ValueError(
                f"the CPU list names more than {_MAX_NAMED} CPUs, "
                "counting repetitions; name each CPU once"
            )
        cpus.update(
            span if used == group else (cpu for cpu in span if (cpu - span.start) % group < used)
        )
    return frozenset(cpus)


def _parse_item(item: str) -> tuple[range, int, int]:
    """Return (the item's whole range, CPUs used per group, CPUs per group)."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"{item[:40]!r} is not a CPU number or range (write for example 0,4-11)")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ValueError(f"the range {item!r} runs backwards; write the lower CPU first")
    if last > MAX_CPU_ID:
        raise ValueError(
            f"CPU {last} in {item!r} is beyond the highest supported number {MAX_CPU_ID}"
        )
    used, group = (int(match[3]), int(match[4])) if match[4] else (1, int(match[3] or 1))
    if not 0 < used <= group:
        raise ValueError(
            f"{item!r}: expected 1 to {group} used CPUs per group of {group}, got {used}"
        )
    return range(first, last + 1), used, group


def parse_cpumask(text: str) -> frozenset[int]:
    """Parse a hex mask in groups of 32 bits, most significant first: ``00000001,00000ff1``.

    Raises:
        ValueError: the text is not a hex mask.
    """
    text = text.strip()
    if _MASK.fullmatch(text) is None:
        raise ValueError(
            f"{text[:40]!r} is not a CPU mask (hex digits in comma-separated groups of at most 8)"
        )
    mask = int("".join(group.rjust(8, "0") for group in text.split(",")), 16)
    if mask.bit_length() > MAX_CPU_ID + 1:
        raise ValueError(f"the CPU mask exceeds the highest supported CPU number {MAX_CPU_ID}")
    return frozenset(cpu for cpu, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")


def format_cpulist(cpus: Iterable[int]) -> str:
    """Return the shortest list that `parse_cpulist` reads back as ``cpus``, such as ``0,4-11``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
