"""Keeps Python's garbage collector from walking through a whole process while an engine is
built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["earlier_objects_left_out"]

_FROZEN_BY_PYTHON = 1000
"""Upper bound: Python 3.12 begins with 375 frozen objects."""

_program_freezes = False
"""Whether this program has frozen its objects. Counting them walks through all, up to a tenth of a
second for each engine, so they are not counted again."""


@contextmanager
def earlier_objects_left_out() -> Iterator[None]:
    """Leave the objects that exist out of collections in the block; new ones are collected as ever.

    DeepSpeed imports torch's compiler while it builds an engine, which makes so many objects that
    the collector walks several times through all that torch has made before. If a program has
    frozen its objects itself, nothing changes.
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
