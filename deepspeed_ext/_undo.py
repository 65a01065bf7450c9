"""What to undo if an engine's constructor fails after something deep inside it was started.

Between the engine and what it starts are DeepSpeed's constructors: if one of them fails, no one has a reference to what
was started before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["on_failure", "undone_on_failure"]

_blocks: list[ExitStack] = []


@contextmanager
def undone_on_failure() -> Iterator[None]:
    """If the block raises, call what was given to `on_failure` inside it, the last first."""
    with ExitStack() as undo:
        _blocks.append(undo)
        try:
            yield
        finally:
            _blocks.remove(undo)
        undo.pop_all()


def on_failure(callback: Callable[[], None]) -> None:
    """Call `callback` if the innermost `undone_on_failure` fails; it must not raise. Outside of one: nothing."""
    if _blocks:
        _blocks[-1].callback(callback)
