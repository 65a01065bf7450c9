"""Argument types of the command line, and their limits."""

import argparse
import re
from collections.abc import Callable

from deepspeed_ext.runtime.words import quoted

__all__ = [
    "MAX_CORES",
    "MAX_JOB_RANKS",
    "MAX_RANKS",
    "MAX_TOKENS",
    "gib",
    "node",
    "numel",
    "reserved_cores",
    "speed",
    "whole",
]

# Larger than any real value, but far too small to exhaust memory or overflow to infinity.
MAX_RANKS = 1024
MAX_CORES = 1 << 16

MAX_JOB_RANKS = 1 << 20
MAX_TOKENS = 1 << 40
MAX_PARAMS = 10**15

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return an argument type: a whole number from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if re.fullmatch("[0-9]{1,18}", text) is None or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {minimum} to {maximum}, got {quoted(text)}"
            )
        return int(text)

    return parse


def numel(text: str) -> int:
    """A number of parameters such as ``7e9``, ``7B``, ``1.5b``, ``124M`` or ``7000000000``."""
    found = re.fullmatch(
        r"([0-9]{1,18})(?:\.([0-9]{1,12}))?(?:[eE]\+?([0-9]{1,2}))?([KMBGTkmbgt]?)", text, re.ASCII
    )
    if found is not None:
        whole, part = found[1], found[2] or ""
        factor = 10 ** int(found[3] or 0) * _FACTORS[found[4].upper()]
        value, rest = divmod(int(whole + part) * factor, 10 ** len(part))
        if rest == 0 and 1 <= value <= MAX_PARAMS:
            return value
    raise argparse.ArgumentTypeError(
        "expected a number of parameters from 1 to 1e15, "
        f"such as 7e9, 7B or 124M, got {quoted(text)}"
    )


def speed(text: str) -> float:
    """A speed above 0 and below 1e9, in its argument's unit."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text, re.ASCII) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(
        f"expected a number above 0, such as 55 or 25.6, got {quoted(text)}"
    )


def gib(text: str) -> float | str:
    """GiB of memory, or ``here``. Vendors write GB and mean GiB."""
    if text == "here":
        return text
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text, re.ASCII) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(
        f"expected GiB, such as 80 or 15.5, or here, got {quoted(text)}"
    )


def reserved_cores(text: str) -> int | float:
    """A number of cores, or a fraction of them below 1."""
    from deepspeed_ext.runtime.reserved_cores import check_reserved_cores

    if text.isdecimal():
        return whole(1, MAX_CORES)(text)
    try:
        return check_reserved_cores(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)[:200]) from None


def node(text: str) -> int | None:
    """The number of a NUMA node; -1 or ``none``: None."""
    return None if text in ("-1", "none") else whole(0, MAX_CORES)(text)
