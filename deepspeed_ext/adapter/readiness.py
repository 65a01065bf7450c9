"""Decides which calls on an optimizer may go on: none that builds on what an exception has left
half done, or on what is on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepspeed_ext.adapter.backward_pass import BackwardPass
from deepspeed_ext.adapter.interruption import Interruption, Work
from deepspeed_ext.adapter.upstream import OffloadStateTypeEnum
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import StateError
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["Readiness"]


class Readiness:
    """What of one optimizer is whole, and here. The engine asks before a call and lets it record
    how the call ends.

    Args:
        config: the ``zenflow`` section.
        backward_pass: follows the engine's backward passes.
        offloaded: returns the states that DeepSpeed has moved to the host.
        has_gradients: whether the gradients of the coming step are complete.
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
        self._predicts = config.rule == "predictive" and config.overlapped
        self._backward_pass = backward_pass
        self._offloaded = offloaded
        self._has_gradients = has_gradients
        self._interruption = Interruption()
        self._is_loading: bool | None = None
        """Whether the load that runs has begun to write; None: none runs."""
        self._passes_taken = 0
        """Backward passes that had ended when the last step did."""

    # -- recording ---------------------------------------------------------------------------------

    def recording(self, work: Work) -> AbstractContextManager[None]:
        """Wrap a call that steps, loads, or may reduce gradients; record an exception that leaves
        it, if it has begun to change something."""
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

    def require_steppable(self, managed: bool) -> None:
        """Check that a step is possible.

        Args:
            managed: whether backward passes, not `step`, complete the gradients.

        Raises:
            ConfigError: a parameter group has a setting with which the worker cannot step.
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
        """Check that nothing is offloaded, or that none of `states` is, and that nothing was
        interrupted.

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
        """Like `require_states_here`, but an interrupted load is accepted: another one writes
        everything that it has."""
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
