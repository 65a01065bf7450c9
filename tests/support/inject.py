"""Which functions of the package a piece of code calls, and the same code with one of them
failing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import deepspeed_ext

__all__ = [
    "STRIKES",
    "InjectedError",
    "Interruption",
    "PreemptedError",
    "called_functions",
    "failing",
]

_WITH_LOCKS = (logging.__file__, threading.__file__)
_PACKAGE = os.path.dirname(os.path.abspath(deepspeed_ext.__file__)) + os.sep


class InjectedError(Exception):
    """Raised by a function that was made to fail."""


class PreemptedError(Exception):
    """What a script's own signal handler raises."""


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _by_handler(kind: type[Exception]) -> Callable[[], None]:
    def handler(number: int, frame: Any) -> None:
        raise kind("time is up")

    def strike() -> None:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            # the handler stays, as in a script, while its exception is on its way
            _KEPT.append(before)

    return strike


_KEPT: list[Any] = []
STRIKES: dict[str, Callable[[], None]] = {
    "KeyboardInterrupt": _ctrl_c,
    "PreemptedError": _by_handler(PreemptedError),
    "TimeoutError": _by_handler(TimeoutError),  # an OSError, as those of connections and files
}
"""How an `Interruption` may strike: Ctrl-C, or an exception of a signal handler."""


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


def _name(frame: FrameType) -> str | None:
    """``zenflow/link.py:WorkerLink.send`` for a function of the package that the package calls;
    None for others: where DeepSpeed or a user calls us, failing at once is the same as if they had
    failed."""
    code, caller = frame.f_code, frame.f_back
    if not _is_ours(code) or "<" in code.co_name or caller is None or not _is_ours(caller.f_code):
        return None
    return f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_qualname}"


@contextmanager
def _profiled(hook: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)


def called_functions(action: Callable[[], Any]) -> list[str]:
    """The package's functions that `action` calls on this thread, in the order of their first
    calls."""
    names: dict[str, None] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := _name(frame)) is not None:
            names[name] = None

    with _profiled(hook):
        action()
    return list(names)


@contextmanager
def failing(name: str | None) -> Iterator[None]:
    """Inside the block the first call of the function `name` raises `InjectedError`; None: nothing
    is changed."""
    if name is None:
        yield
        return
    armed = True

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal armed
        if armed and event == "call" and _name(frame) == name:
            armed = False
            raise InjectedError(name)

    with _profiled(hook):
        yield


class Interruption:
    """Raises at a line that this thread executes inside the block, whosever code it is, as a signal
    may. Lines of `logging` and `threading` are left out: they could leave a lock of the whole
    process locked.

    Args:
        at: number of the line, from 0; None: count the lines only.
        strike: raises, or calls a signal handler that does.

    Attributes:
        lines: how many lines were executed, up to the one that was hit.
        place: file and line that was hit; empty: none.
    """

    def __init__(self, at: int | None, strike: Callable[[], Any]) -> None:
        self._at, self._strike = at, strike
        self.lines, self.place = 0, ""
        self._before: Any = None

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_left_out = (
            frame.f_code is Interruption.__exit__.__code__
            or frame.f_code.co_filename in _WITH_LOCKS
        )
        return None if is_left_out else self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._line
        if self.lines == self._at:
            sys.settrace(self._before)
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            self.lines += 1
            self._strike()
        self.lines += not self.place
        return self._line

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
