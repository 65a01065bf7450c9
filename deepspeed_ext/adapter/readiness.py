"""Decides which calls on an optimizer may run: none that depends on work that an exception
interrupted, or on offloaded states.

Note: [the end of a backward pass]
A pass is open from our first hook in a graph task until that task's final callback. Autograd calls
it when the whole task has run, and never after an exception. So a pass that is open while no graph
task runs on this thread was interrupted. This also detects a failed ``loss.backward()``, which
calls nothing of ours when it raises. A nested graph task belongs to the pass of the outer one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import BackwardHookStateManager, OffloadStateTypeEnum
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import CheckpointError, ConfigError, StateError
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["BackwardPass", "Interruption", "Readiness", "Work"]

_REMEDY = "build a new engine, and load the last checkpoint"


class Work(enum.Enum):
    """Work that leaves an inconsistent state if an exception interrupts it; the values describe
    that state and the remedy."""

    STEP = (
        "the last optimizer step, so weights, optimizer and scheduler may be partly updated: "
        f"{_REMEDY}"
    )
    BACKWARD = (
        "the last backward pass, which may have reduced some of the gradients. Weights and "
        f"optimizer are those of the step before and can be saved. To train on, {_REMEDY}"
    )
    LOAD = (
        "the last load, so weights, optimizer and counters may be of different checkpoints: load "
        "one completely"
    )


class Interruption:
    """The only record of interrupted work, written when an exception leaves that work.

    Attributes:
        work: what was interrupted; None: nothing.
    """

    def __init__(self) -> None:
        self.work: Work | None = None
        self._cause = ""

    @contextmanager
    def recorded(self, work: Work, has_begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Wrap `work`; record an exception that leaves it, if `has_begun` then returns True."""
        try:
            yield
        except GeneratorExit:  # a signal handler raised after the block: the work is complete
            raise
        except BaseException as error:
            if has_begun():
                self.record(work, error)
            raise

    def record(self, work: Work, error: BaseException | None) -> None:
        """Record that `error` interrupted `work`; None: an unknown exception."""
        said = f" ({error})" if str(error or "") else ""
        self._cause = "an exception" if error is None else f"{type(error).__name__}{said}"
        self.work = work

    def healed(self) -> None:
        """Clear the record, after a complete load has replaced all state."""
        self.work = None

    def require_none(self, *unless: Work) -> None:
        """Check that no work was interrupted, other than `unless`.

        Raises:
            StateError: some was.
        """
        if self.work is not None and self.work not in unless:
            raise StateError(f"{self._cause} interrupted {self.work.value}")


_NO_TASK = -1
_TWICE = (
    "a parameter got a second gradient inside one engine.backward(loss), from a nested pass: a "
    "hook that runs the model again, as GradCache's does, or a reentrant checkpoint. DeepSpeed "
    "reduces each parameter once in that call. Call loss.backward() instead, or use checkpoints "
    "with use_reentrant=False"
)


class BackwardPass(BackwardHookStateManager):
    """DeepSpeed's state of a backward pass, but entered and left exactly once.

    DeepSpeed enters once for each `forward` of a loss and leaves once. So its depth grows, the next
    ``loss.backward()`` looks nested, and would end without reducing its last gradients. Also,
    DeepSpeed queues its final callback once between two calls of `forward`, so a second
    ``loss.backward()`` there would have none.

    Args:
        begins: called before a pass begins.
        parameters: returns the trained parameters.

    Attributes:
        passes: number of passes that have ended.
    """

    def __init__(self, begins: Callable[[], None], parameters: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self.passes = 0
        self._begins, self._parameters = begins, parameters
        self._is_open = False
        self._graph_task = _NO_TASK
        # graph tasks that reduced gradients, for each call that is recorded
        self._tasks: list[set[int]] = []
        self._reduced = 0  # gradients, in all passes
        # `_reduced` and `_left()` when the last pass began
        self._reduced_before = 0
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
        """Called before each gradient is reduced, also in graph tasks that do not begin at an
        output of the engine."""
        if not self._is_open and self.backward_seen_this_step:
            self.enter_backward()
        for tasks in self._tasks:
            tasks.add(torch._C._current_graph_task_id())
        self._reduced += 1

    def queue_post_backward_callback(self) -> bool:
        """Queue the callback on the graph task that began the pass."""
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
            # inside an outer pass, unreduced gradients may be those of that pass
            with interruption.recorded(
                Work.BACKWARD, lambda: self._has_changed(before, may_be_left=not was_open)
            ):
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
        """Whether gradients were reduced since then, or autograd has left unreduced ones."""
        if self._reduced != reduced_before:
            return True
        return may_be_left and self._is_open and self._left() != self._left_before

    def _left(self) -> list[Any]:
        """Identity and version of each parameter's gradient."""
        gradients = (param.grad for param in self._parameters())
        return [
            gradient if gradient is None else (id(gradient), gradient._version)
            for gradient in gradients
        ]

    def _close(self) -> None:
        self._is_open, self.backward_active_depth = False, 0


class Readiness:
    """Tracks interrupted work and offloaded states of one optimizer. The engine checks it before a
    call and records in it how the call ends.

    Args:
        config: the ``zenflow`` section.
        backward_pass: follows the engine's backward passes.
        offloaded: returns the states that DeepSpeed has moved to the host.
        has_gradients: whether the gradients of the next step are complete.
    """

    def __init__(
        self,
        host: HostOptimizer,
        config: ZenFlowConfig,
        backward_pass: BackwardPass,
        offloaded: Callable[[], Collection[Any]],
        has_gradients: Callable[[], bool],
    ) -> None:
        self._host = host
        self._predicts = config.predicts
        self._backward_pass = backward_pass
        self._offloaded = offloaded
        self._has_gradients = has_gradients
        self._interruption = Interruption()
        self._is_loading: bool | None = None
        """Whether the current load has begun to write; None: no load runs."""
        self._passes_taken = 0
        """Number of backward passes that had ended when the last step did."""

    # -- recording ---------------------------------------------------------------------------------

    def recording(self, work: Work) -> AbstractContextManager[None]:
        """Wrap a call that steps, loads, or may reduce gradients; record an exception that leaves
        it after it has begun to change state."""
        if work is Work.BACKWARD:
            return self._backward_pass.recorded(self._interruption)
        return self._recording_load() if work is Work.LOAD else self._interruption.recorded(work)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Wrap the optimizer's step, which takes the gradients of all backward passes so far."""
        with self.recording(Work.STEP):
            yield
            self._passes_taken = self._backward_pass.passes

    @contextmanager
    def _recording_load(self) -> Iterator[None]:
        """Wrap a load; record an exception that leaves it once it has begun to write."""
        self._is_loading = False
        try:
            with self._interruption.recorded(Work.LOAD, lambda: bool(self._is_loading)):
                yield
            if self._is_loading:
                self._interruption.healed()
        finally:
            self._is_loading = None

    def load_begins(self) -> None:
        """Note that a load writes weights, optimizer or counters from now on."""
        if self._is_loading is not None:
            self._is_loading = True

    # -- checks, before anything changes -----------------------------------------------------------

    def require_groups(self, groups: Sequence[Mapping[str, Any]], where: str) -> None:
        """Check the parameter groups of a checkpoint.

        Args:
            where: what holds them, such as a file.

        Raises:
            CheckpointError: one has a setting with which the worker cannot step.
        """
        try:
            self._host.kind.require_steppable(predicts=self._predicts, groups=groups)
        except ConfigError as error:
            raise CheckpointError(
                f"{where}: {error}. Load another checkpoint by its tag, or only the weights"
            ) from error

    def require_steppable(self, managed: bool) -> None:
        """Check that a step is possible.

        Args:
            managed: whether backward passes, not `step`, complete the gradients.

        Raises:
            ConfigError: a parameter group has a setting that the worker does not support.
            StateError: no backward pass since the last step has completed the gradients.
        """
        if self._host.link.failed:  # all ranks get its error
            return
        self._host.kind.require_steppable(predicts=self._predicts)
        has_passed = self._backward_pass.passes != self._passes_taken
        if not has_passed or (managed and not self._has_gradients()):
            raise StateError(
                "step() was called, but no backward pass since the last step has completed the "
                "gradients: call engine.backward(loss) before each step(), with a loss that "
                "depends on what engine(...) returned"
            )

    def require_states_here(self, *states: Any) -> None:
        """Check that none of `states` (none given: no state at all) is offloaded, and that nothing
        was interrupted.

        Raises:
            StateError: `offload_states` was called, and `reload_states` was not; or an exception
                such as Ctrl-C has interrupted a step, a backward pass or a load.
        """
        self.require_whole()
        self._require_here(states)

    def require_saveable(self) -> None:
        """Like `require_states_here`, but an interrupted backward pass is accepted: it changes
        nothing that is saved."""
        self.require_whole(Work.BACKWARD)
        self._require_here(())

    def require_loadable(self) -> None:
        """Like `require_states_here`, but an interrupted load is accepted: another load overwrites
        all that it wrote."""
        self.require_whole(Work.LOAD)
        self._require_here(())

    def require_whole(self, *unless: Work) -> None:
        """Check that nothing was interrupted, other than `unless`.

        Raises:
            StateError: an exception has interrupted it.
        """
        self._backward_pass.notice(self._interruption)
        if not self._host.link.failed:  # otherwise all ranks get its error
            self._interruption.require_none(*unless)

    def _require_here(self, states: Collection[Any]) -> None:
        away = set(self._offloaded())
        if self._host.is_offloaded:
            away.add(OffloadStateTypeEnum.optim_states)
        if away := away.intersection(states or away):
            names = ", ".join(sorted(state.value for state in away))
            raise StateError(
                f"engine.offload_states has moved {names} to the host: call engine.reload_states() "
                "before the next forward, backward, step, save or load"
            )
