"""Words of messages."""

from __future__ import annotations

__all__ = ["LOAD_ANOTHER", "counted", "one_line", "quoted"]

LOAD_ANOTHER = "load another checkpoint by its tag"
"""What to do if one cannot be loaded."""


def counted(count: int, noun: str) -> str:
    """The number and the noun, "1 group" or "2 groups". `noun`: singular, with a plural in -s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def quoted(text: str) -> str:
    """``text`` in quotes, as messages show what a user wrote: its first 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def one_line(error: BaseException) -> str:
    """The type and the text of an error, if it has one."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
