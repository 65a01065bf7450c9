"""Words of messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """The number and the noun, "1 group" or "2 groups". `noun`: singular, with a plural in -s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
