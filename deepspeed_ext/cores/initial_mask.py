"""Records which CPUs this process may use, before torch's OpenMP runtime or core binding narrows
its masks."""

import os
import sys

__all__ = ["initial", "keep", "present", "record"]

_initial: frozenset[int] | None = None
_before_binding: frozenset[int] | None = None


def record() -> None:
    """Record the calling thread's mask, once, unless torch was imported before. Takes
    microseconds."""
    global _initial
    if _initial is None and "torch" not in sys.modules:
        _initial = present() or None


def keep(cpus: frozenset[int] | None) -> None:
    """Keep the CPUs that were allowed before core binding, for as long as it is in force; None: it
    has ended."""
    global _before_binding
    _before_binding = cpus


def initial() -> frozenset[int] | None:
    """Return the mask that `record` saw, otherwise the CPUs kept by `keep`; None if torch was
    imported first and nothing is bound, or the platform has no affinity masks."""
    return _initial if _initial is not None else _before_binding


def present() -> frozenset[int]:
    """Return the calling thread's mask; empty if the platform has no affinity masks."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
