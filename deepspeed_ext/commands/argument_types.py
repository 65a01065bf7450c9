"""Argument types of the command line, and their limits."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from deepspeed_ext.runtime.log import quoted

__all__ = [
    "MAX_CORES",
    "MAX_ELEMENTS",
    "MAX_JOB_RANKS",
    "MAX_RANKS",
    "MAX_SECONDS",
    "MAX_STEPS",
    "MAX_TOKENS",
    "MAX_VERIFY_STEPS",
    "milliseconds",
    "node",
    "read_by",
    "reserved_cores",
    "whole",
]

# Larger than any real value, but far too small to exhaust memory or overflow to infinity.
MAX_RANKS = 1024
MAX_CORES = 1 << 16
MAX_ELEMENTS = 1 << 48
MAX_STEPS = 1 << 20
MAX_MILLISECONDS = 1e9

MAX_JOB_RANKS = 1 << 20
MAX_TOKENS = 1 << 40
MAX_VERIFY_STEPS, MAX_SECONDS = 1000, 24 * 3600


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return an argument type: a whole number from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if re.fullmatch("[0-9]{1,18}", text) is None or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {minimum} to {maximum}, got {quoted(text)}"
            )
        return int(text)

    return parse


def read_by(parser: str) -> Callable[[str], Any]:
    """Return an argument type: the named parser of `commands.memory.command`, imported when it is
    used."""

    def parse(text: str) -> Any:
        from deepspeed_ext.commands.memory import command

        try:
            return getattr(command, parser)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


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


def milliseconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= MAX_MILLISECONDS:  # also rejects NaN
        raise argparse.ArgumentTypeError(
            f"expected milliseconds above 0 and at most {MAX_MILLISECONDS:g}, got {quoted(text)}"
        )
    return value
