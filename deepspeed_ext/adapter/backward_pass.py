"""Follows the backward passes of an engine: which one is open, and whether an exception ended it.

Note: [the end of a backward pass]
A pass is open from the first hook of ours in a graph task until that task's final callback. Autograd
calls it when the whole task has run, and never after an exception. So a pass that is open while no
graph task runs on this thread was interrupted, also in ``loss.backward()``, which passes no call of
ours on its way out. A graph task that runs inside another one belongs to the pass of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.adapter.interruption import Interruption, Work
from deepspeed_ext.adapter.upstream import BackwardHookStateManager
from deepspeed_ext.errors import StateError

__all__ = ["BackwardPass"]

_NO_TASK = -1
_TWICE = (
    "a parameter has got a second gradient inside one engine.backward(loss), from a pass within that "
    "pass: a hook that runs the model again, as GradCache's does, or a reentrant checkpoint. DeepSpeed "
    "reduces each parameter once in that call. Call loss.backward() instead; checkpoints work with "
    "use_reentrant=False, too"
)


class BackwardPass(BackwardHookStateManager):
    """DeepSpeed's state of a backward pass, entered once and left once.

    DeepSpeed enters once for each `forward` behind a loss and leaves once, so its depth grows, and
    the next ``loss.backward()`` is taken for one inside another: it would end without reducing its
    last gradients. And it queues its final callback once between two calls of `forward`, so a second
    ``loss.backward()`` there would have none.

    Args:
        begins: called before a pass begins.
        parameters: returns what is trained.

    Attributes:
        passes: number of passes that have ended.
    """

    def __init__(self, begins: Callable[[], None], parameters: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self.passes = 0
        self._begins, self._parameters = begins, parameters
        self._is_open = False
        self._graph_task = _NO_TASK
        self._tasks: list[set[int]] = []  # graph tasks that reduced gradients, for each call that is recorded
        self._reduced = 0  # gradients, of all passes
        self._reduced_before = 0  # when the last pass began, as the next one
        self._left_before: list[Any] = []

    # -- what DeepSpeed calls ----------------------------------------------------------------------

    def enter_backward(self) -> None:
        if not self._is_open:
            self._begins()
            self._reduced_before, self._left_before = self._reduced, self._left()
            self._is_open, self._graph_task = True, torch._C._current_graph_task_id()
            self.post_backward_callback_queued = False
        if self.backward_active_depth == 0:
            super().enter_backward()

    def reenter_backward_if_needed(self) -> None:
        """Called before each gradient is reduced, also in graph tasks that no output has announced."""
        if not self._is_open and self.backward_seen_this_step:
            self.enter_backward()
        for tasks in self._tasks:
            tasks.add(torch._C._current_graph_task_id())
        self._reduced += 1

    def queue_post_backward_callback(self) -> bool:
        """Queue it on the graph task that began the pass."""
        is_inner = self._is_open and torch._C._current_graph_task_id() != self._graph_task
        return is_inner or super().queue_post_backward_callback()

    def run_grad_acc_post_hooks(self) -> None:
        super().run_grad_acc_post_hooks()
        self.passes += self._is_open
        self._is_open = False

    # -- interruptions -----------------------------------------------------------------------------

    @contextmanager
    def recorded(self, interruption: Interruption) -> Iterator[None]:
        """Wrap a call that may reduce gradients, perhaps inside a pass that goes on.

        Raises:
            StateError: DeepSpeed has refused a second gradient of a parameter, from a nested pass.
        """
        was_open, before = self._is_open, self._reduced
        self._tasks.append(set())
        try:
            # Inside a pass that goes on, gradients that wait for their hook may be its own.
            with interruption.recorded(Work.BACKWARD, lambda: self._has_changed(before, may_be_left=not was_open)):
                yield
        except BaseException as error:
            if not was_open:
                self._close()
            if len(self._tasks[-1]) > 1 and isinstance(error, AssertionError):
                raise StateError(_TWICE) from error
            raise
        finally:
            self._tasks.pop()

    def notice(self, interruption: Interruption) -> None:
        """Record a pass that an exception has ended; see [the end of a backward pass]."""
        if self._is_open and torch._C._current_graph_task_id() == _NO_TASK:
            if self._has_changed(self._reduced_before):
                interruption.record(Work.BACKWARD, None)
            self._close()

    def _has_changed(self, reduced_before: int, *, may_be_left: bool = True) -> bool:
        """Whether gradients were reduced since then, or autograd has left some that were not."""
        if self._reduced != reduced_before:
            return True
        return may_be_left and self._is_open and self._left() != self._left_before

    def _left(self) -> list[Any]:
        """Which gradients are at the parameters, and how often each was written."""
        gradients = (param.grad for param in self._parameters())
        return [gradient if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _close(self) -> None:
        self._is_open, self.backward_active_depth = False, 0
