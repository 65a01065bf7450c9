"""Decides which calls on an optimizer may run: none on work that an exception interrupted, none
inside an open step or load, and none on offloaded states.

Note: [the end of a backward pass]
A pass is open from our first hook in a graph task until that task's final callback. Autograd calls
it when the whole task has run, and never after an exception. So a pass that is open while no graph
task runs on this thread was interrupted. This also detects a failed ``loss.backward()``, which
calls nothing of ours when it raises. A nested graph task belongs to the pass of the outer one.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import BackwardHookStateManager, OffloadStateTypeEnum
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import CheckpointError, ConfigError, StateError
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

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


_TWICE = (
    "a parameter got a second gradient inside one engine.backward(loss), from a nested pass, and "
    "DeepSpeed reduces each parameter once in that call. If the pass is that of a checkpoint, use "
    "use_reentrant=False; if a hook runs the model again, as GradCache's does, call "
    "loss.backward() in place of engine.backward(loss)"
)
_NO_TASK = -1


class BackwardPass(BackwardHookStateManager):
    """DeepSpeed's state of a backward pass, but entered and left exactly once.

    DeepSpeed enters once for each `forward` of a loss and leaves once. So its depth grows, the next
    ``loss.backward()`` looks nested, and would end without reducing its last gradients. Also,
    DeepSpeed queues its final callback once between two calls of `forward`, so a second
    ``loss.backward()`` there would have none.

    Args:
        begins: called before a pass begins.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        super().__init__()
        self.passes = 0  # that have ended
        self.graph_tasks: set[int] = (
            set()
        )  # with reduced gradients, in the newest call of the engine
        self._begins = begins
        self.is_open = False
        self._graph_task = _NO_TASK
        self._has_reduced = False  # in this pass

    def enter_backward(self) -> None:
        if not self.is_open:
            self._begins()
            self.is_open, self._graph_task = True, torch._C._current_graph_task_id()
            self._has_reduced = self.post_backward_callback_queued = False
        if self.backward_active_depth == 0:
            super().enter_backward()

    def reenter_backward_if_needed(self) -> None:
        """Called before each gradient is reduced, also in graph tasks that do not begin at an
        output of the engine."""
        if not self.is_open and self.backward_seen_this_step:
            self.enter_backward()
        self._has_reduced = True
        self.graph_tasks.add(torch._C._current_graph_task_id())

    def queue_post_backward_callback(self) -> bool:
        """Queue the callback on the graph task that began the pass."""
        is_inner = self.is_open and torch._C._current_graph_task_id() != self._graph_task
        return is_inner or super().queue_post_backward_callback()

    def run_grad_acc_post_hooks(self) -> None:
        super().run_grad_acc_post_hooks()
        self.passes += self.is_open
        self.is_open = False

    def ended_early(self) -> bool:
        """Close a pass that an exception has ended; return whether there was one that had reduced
        gradients. See Note: [the end of a backward pass]."""
        if not self.is_open or torch._C._current_graph_task_id() != _NO_TASK:
            return False
        self.is_open, self.backward_active_depth = False, 0
        return self._has_reduced


class _Running:
    """Context of one piece of work. It lives as long as the frame that entered it, so work whose
    context was left without notice, by an exception between two lines, is not taken for running."""

    def __init__(self, readiness: Readiness, work: Work) -> None:
        self._readiness, self._work = readiness, work

    def __enter__(self) -> None:
        self._readiness.begins(self, self._work)

    def __exit__(self, kind: Any, error: BaseException | None, place: Any) -> None:
        self._readiness.ends(self, error)


class Readiness:
    """Which calls on one optimizer may run. The engine asks before a call, and runs what steps,
    loads or may reduce gradients inside `recording`.

    Args:
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
        self._running: tuple[Work, weakref.ref[_Running]] | None = None
        self._poison: tuple[Work, str] | None = None  # what was interrupted, and by what
        self._load_writes = False
        self._passes_taken = 0  # those that had ended when the last step did

    # -- recording ---------------------------------------------------------------------------------

    def recording(self, work: Work) -> _Running:
        """Context of a call that steps, loads, or may reduce gradients. An exception that leaves it
        after it has begun to change state is remembered; work inside other work is part of that."""
        return _Running(self, work)

    def begins(self, running: _Running, work: Work) -> None:
        if self._now() is None:
            self._load_writes = False
            self._backward_pass.graph_tasks.clear()
            self._running = work, weakref.ref(running)

    def ends(self, running: _Running, error: BaseException | None) -> None:
        if self._running is None or self._running[1]() is not running:
            return
        work = self._running[0]
        if error is not None:
            told = f" ({error})" if str(error) else ""
            self._interrupted(work, f"{type(error).__name__}{told}")
        elif work is Work.LOAD and self._load_writes:
            self._poison = None
        self._running = None
        if isinstance(error, AssertionError) and len(self._backward_pass.graph_tasks) > 1:
            raise StateError(_TWICE) from error

    def took_gradients(self) -> None:
        """Note that a step has taken the gradients of all backward passes so far."""
        self._passes_taken = self._backward_pass.passes

    @property
    def has_passed(self) -> bool:
        return self._backward_pass.passes != self._passes_taken

    def load_begins(self) -> None:
        """Note that a load writes weights, optimizer or counters from now on."""
        self._load_writes = True

    def _now(self) -> Work | None:
        """The work that runs now."""
        if self._running is not None and self._running[1]() is None:
            work, self._running = self._running[0], None
            self._interrupted(work)
        return None if self._running is None else self._running[0]

    def _interrupted(self, work: Work, by: str = "an exception") -> None:
        """Note that an exception has ended `work`, if that had begun to change state."""
        if work is Work.LOAD:
            has_begun = self._load_writes
        else:
            has_begun = work is Work.STEP or self._backward_pass.ended_early()
        if has_begun:
            self._poison = work, by

    # -- checks, before anything changes -----------------------------------------------------------

    def require_groups(self, groups: Sequence[Mapping[str, Any]], where: str) -> None:
        """Check the parameter groups of a checkpoint, `where` in messages.

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
        """Check that a step is possible. `managed`: backward passes, not `step`, complete the
        gradients.

        Raises:
            ConfigError: a parameter group has a setting that the worker does not support.
            StateError: no backward pass since the last step has completed the gradients.
        """
        if self._host.link.failed:  # all ranks get its error
            return
        self._host.kind.require_steppable(predicts=self._predicts)
        if not self.has_passed or (managed and not self._has_gradients()):
            raise StateError(
                "step() was called, but no backward pass since the last step has completed the "
                "gradients: call engine.backward(loss) before each step(), with a loss that "
                "depends on what engine(...) returned"
            )

    def require_closed(self) -> None:
        """Check that no step or load of this engine runs now.

        Raises:
            StateError: one does, so this is called by a signal handler or another thread.
        """
        if (work := self._now()) in (Work.STEP, Work.LOAD):
            name = "an optimizer step" if work is Work.STEP else "a load"
            raise StateError(
                f"{name} of this engine is running, so a call from a signal handler or another "
                "thread must wait; nothing has changed, and it goes on. Let the handler only set a "
                "flag, and check the flag between steps"
            )

    def require_states_here(self, *states: Any, unless: Work | None = None) -> None:
        """Check that none of `states` (none given: no state at all) is offloaded, and that nothing
        was interrupted, other than `unless`.

        Raises:
            StateError: `offload_states` was called, and `reload_states` was not; or an exception
                such as Ctrl-C has interrupted a step, a backward pass or a load.
        """
        self.require_whole(unless)
        away = set(self._offloaded())
        if self._host.is_offloaded:
            away.add(OffloadStateTypeEnum.optim_states)
        if away := away.intersection(states or away):
            names = ", ".join(sorted(state.value for state in away))
            raise StateError(
                f"engine.offload_states has moved {names} to the host: call engine.reload_states() "
                "before the next forward, backward, step, save or load"
            )

    def require_saveable(self) -> None:
        """An interrupted backward pass changes nothing that is saved."""
        self.require_states_here(unless=Work.BACKWARD)

    def require_loadable(self) -> None:
        """Another load overwrites all that an interrupted one wrote."""
        self.require_states_here(unless=Work.LOAD)

    def require_whole(self, unless: Work | None = None) -> None:
        """Check that nothing was interrupted, other than `unless`.

        Raises:
            StateError: an exception has interrupted it.
        """
        if self._now() is None:
            self._interrupted(Work.BACKWARD)
        if self._poison is not None and not self._host.link.failed:  # all ranks get its error
            work, cause = self._poison
            if work is not unless:
                raise StateError(f"{cause} interrupted {work.value}")
