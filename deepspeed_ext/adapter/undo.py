"""Undoes what was started if an engine's constructor fails later.

DeepSpeed's constructors stand between the engine and what it starts. If one of them fails, the engine has no reference
to what was started before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["on_failure", "undone_on_failure"]

_blocks: list[ExitStack] = []


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """If the block raises, call the callbacks that `on_failure` registered inside it, last first."""
    with ExitStack() as undo:
        _blocks.append(undo)
        try:
            yield
        finally:
            _blocks.remove(undo)
        undo.pop_all()


def on_failure(callback: Callable[[], None]) -> None:
    """Call `callback`, which must not raise, if the innermost `undone_on_failure` fails. Outside of one, do nothing."""
    if _blocks:
        _blocks[-1].callback(callback)
