"""Records what an exception has left half done, so that the next call can refuse to build on it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed_ext.errors import StateError

__all__ = ["Interruption", "Work"]

_REMEDY = "build a new engine, and load the last checkpoint"


class Work(enum.Enum):
    """Work that leaves something behind if an exception ends it early; the values say what."""

    STEP = f"the last optimizer step, of which weights, optimizer and scheduler may hold a part: {_REMEDY}"
    BACKWARD = (
        "the last backward pass, which may have reduced a part of the gradients. Weights and "
        f"optimizer are those of the step before and can be saved. To train on, {_REMEDY}"
    )
    LOAD = "the last load, so weights, optimizer and counters may be of several checkpoints: load one as a whole"


class Interruption:
    """The one record of what was interrupted. It is written where an exception leaves.

    Attributes:
        work: what was left half done; None: nothing.
    """

    def __init__(self) -> None:
        self.work: Work | None = None
        self._cause = ""

    @contextmanager
    def recorded(self, work: Work, has_begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Wrap `work`. An exception that leaves is recorded if `has_begun` then returns True."""
        try:
            yield
        except GeneratorExit:  # a signal's exception came after the block: the work is whole
            raise
        except BaseException as error:
            if has_begun():
                self.record(work, error)
            raise

    def record(self, work: Work, error: BaseException | None) -> None:
        """Record that `error` has interrupted `work`; None: an exception that nobody has seen."""
        said = f" ({error})" if str(error or "") else ""
        self._cause = "an exception" if error is None else f"{type(error).__name__}{said}"
        self.work = work

    def healed(self) -> None:
        """Forget the record: a whole load has replaced everything."""
        self.work = None

    def require_none(self, *unless: Work) -> None:
        """Refuse to continue after an interruption.

        Args:
            unless: work whose interruption does not matter here.

        Raises:
            StateError: something was interrupted.
        """
        if self.work is not None and self.work not in unless:
            raise StateError(f"{self._cause} has broken off {self.work.value}")
