"""The CPU mask of this process before torch, and with it an OpenMP runtime, could narrow it."""

import os
import sys

__all__ = ["initial", "take"]

_initial: frozenset[int] | None = None


def take() -> None:
    """Remember the mask of the calling thread, once, unless torch was imported first; costs microseconds."""
    global _initial
    if _initial is None and "torch" not in sys.modules and hasattr(os, "sched_getaffinity"):
        _initial = frozenset(os.sched_getaffinity(0))


def initial() -> frozenset[int] | None:
    """The mask that `take` saw; None where it came too late or the platform has none."""
    return _initial
