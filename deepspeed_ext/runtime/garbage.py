"""Keeps Python's garbage collector from traversing all existing objects while an engine is
built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["earlier_objects_left_out"]

_FROZEN_BY_PYTHON = 1000
"""Upper bound: Python 3.12 begins with 375 frozen objects."""

_program_freezes = False
"""Whether this program has frozen its objects. Counting frozen objects takes up to 0.1 s, so a
positive answer is kept."""


@contextmanager
def earlier_objects_left_out() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the block; new ones are collected.

    While DeepSpeed builds an engine it imports torch's compiler, whose many objects would make the
    collector traverse all earlier ones several times. Does nothing if the program has frozen its
    objects itself.
    """
    global _program_freezes
    _program_freezes = _program_freezes or gc.get_freeze_count() > _FROZEN_BY_PYTHON
    if _program_freezes:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
