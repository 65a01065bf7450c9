"""Records the CPU mask of this process before torch loads an OpenMP runtime, which may narrow it."""

import os
import sys

__all__ = ["initial", "record"]

_initial: frozenset[int] | None = None


def record() -> None:
    """Record the calling thread's mask, once, unless torch was imported before. Takes microseconds."""
    global _initial
    if _initial is None and "torch" not in sys.modules and hasattr(os, "sched_getaffinity"):
        _initial = frozenset(os.sched_getaffinity(0))


def initial() -> frozenset[int] | None:
    """Return the mask that `record` saw; None if torch was imported first or the platform has no affinity masks."""
    return _initial
