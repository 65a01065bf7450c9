"""Assigns disjoint CPU cores to each rank's PyTorch threads and optimizer process.

`host` reads facts from a directory tree, and sets masks; `plan` computes a plan from them, without
torch, DeepSpeed or system calls. `binding` agrees on the plan among ranks and holds the object that
an engine uses.

The package itself records which CPUs this process may use, before torch's OpenMP runtime or core
binding narrows its masks. So importing it imports nothing else.
"""

import os
import sys

_initial: frozenset[int] | None = None
_before_binding: frozenset[int] | None = None


def record_mask() -> None:
    """Record the calling thread's mask, once, unless torch was imported before."""
    global _initial
    if _initial is None and "torch" not in sys.modules:
        _initial = present_mask() or None


def keep_mask(cpus: frozenset[int] | None) -> None:
    """Keep the CPUs that were allowed before core binding, while in force; None: it has ended."""
    global _before_binding
    _before_binding = cpus


def initial_mask() -> frozenset[int] | None:
    """What `record_mask` saw, otherwise what `keep_mask` keeps; None: torch was imported first and
    nothing is bound, or the platform has no affinity masks."""
    return _initial if _initial is not None else _before_binding


def present_mask() -> frozenset[int]:
    """The calling thread's mask; empty if the platform has no affinity masks."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
