"""Holds what both ZenFlow optimizers share: DeepSpeed steps, `OffloadedAdam` computes.

DeepSpeed's `step` runs unchanged, with a `GradientReceiver` in place of each master (see `step`). No method body of
DeepSpeed is copied.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.adapter.autocast_scale import AutocastScale
from deepspeed_ext.adapter.backward_pass import BackwardPass
from deepspeed_ext.adapter.exports import ExactWeights
from deepspeed_ext.adapter.grad_norm import norm_tensors
from deepspeed_ext.adapter.gradients_on_host import GradientsOnHost
from deepspeed_ext.adapter.interruption import Interruption, Work
from deepspeed_ext.adapter.step import GradientReceiver, Step
from deepspeed_ext.adapter.upstream import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    host_offload_config,
    later_groups,
    pins_offload_buffers,
)
from deepspeed_ext.checkpoint import zenflow_state as checkpoint
from deepspeed_ext.checkpoint.saved_state import SavedState, read_saved_state
from deepspeed_ext.errors import CheckpointError, PlanMismatchError, StateError, WorkerError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.ranks import (
    RankGroup,
    agreed,
    communicating_on_host,
    open_communicators,
    require_same_plan,
    together,
)
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.start import ZenFlowStart, start_adam
from deepspeed_ext.zenflow.step.copies import Run, largest_block_apart, mixed
from deepspeed_ext.zenflow.step.shown_state import ShownTensor, plain
from deepspeed_ext.zenflow.step.supported import require_publishable
from deepspeed_ext.zenflow.worker.kernel.adam_pass import dtype_name

__all__ = ["ZenFlowStepping"]

_AUTOCAST_SCALE = "deepspeed_ext_autocast_scale"
"""Key of the loss scale of ``torch_autocast`` in an optimizer's state dict."""


class ZenFlowStepping(GradientsOnHost):
    """Behaviour shared by both ZenFlow optimizers; comes before DeepSpeed's optimizer class among the bases.

    Attributes:
        zenflow_adam: the optimizer that owns the worker.
        exact_weights: context in which the model has p, rounded to its dtype, in place of predicted weights; see
            `ExactWeights`.
    """

    torch_autocast_gradscaler: Any
    _autocast_scale: AutocastScale | None
    offloaded_states: set[Any]
    _copies_state = True
    _waits_after_weights = False
    """Whether DeepSpeed waits for the device once all weights are written (see `OffloadedAdam.finish_weights`)."""
    _is_loading: bool | None = None
    """Whether the load that runs has begun to write; None: none runs."""
    _states_away = False
    _passes_taken = 0
    """Backward passes that had ended when the last step did."""

    def _prepare(self, start: ZenFlowStart, kwargs: dict[str, Any]) -> None:
        """Change the keyword arguments of DeepSpeed's construction to those of CPU offload."""
        self._start = start
        self._pins_sums = pins_offload_buffers(kwargs.get("offload_optimizer_config"))
        kwargs["offload_optimizer_config"] = host_offload_config()
        if kwargs["gradient_accumulation_steps"] > 1:
            kwargs["gradient_accumulation_dtype"] = torch.float32

    def _start_adam(self, groups: Sequence[int]) -> None:
        """Start the worker. `groups` holds the index of each partition's parameter group."""
        self._dp_ranks = ranks = RankGroup.of(self.dp_process_group, keeps_scratch=True)
        caller = Caller(
            dtype_name(self._weights(0).dtype),
            dtype_name(self.gradient_accumulation_dtype),
            self._place_of_weights,
            self._can_take_gradients,
            1 if self._can_take_gradients else ranks.size,
            self._flattens_sums,
            self._bucket_bytes,
        )
        require_publishable(self._start.run.config, caller.weights_dtype)
        holders = [self._holders(index, ranks) for index in range(len(groups))]
        others = [RankGroup.of(group) for group in later_groups(self)]
        open_communicators([self._start.ranks, ranks, *holders, *others])
        self.zenflow_adam = start_adam(
            self._start,
            self.optimizer,
            groups,
            self._weights,
            caller,
            ranks,
            holders,
        )
        self._warn_of_mixed_blocks()
        scaler = self.torch_autocast_gradscaler
        self._autocast_scale = None if scaler is None else AutocastScale(scaler)
        drain = partial(self._drain_together, shows_moments=False)
        self.exact_weights = ExactWeights(self.zenflow_adam, self._weights, drain, self._spread_weights)
        grad_dtype = getattr(torch, self.zenflow_adam.decided.dtypes.gradient)
        receivers = [GradientReceiver(each.master.data, grad_dtype) for each in self.zenflow_adam.states]
        self._step = Step(receivers)
        self._interruption = Interruption()
        self._backward_pass = BackwardPass(self.clear_backward_seen_flag, self._trained)
        self._backward_hook_state = self._backward_pass

    @abstractmethod
    def _runs(self) -> list[list[Run]]:
        """The parameters of each partition."""

    def _warn_of_mixed_blocks(self) -> None:
        """Warn of copies on tensor-parallel ranks that would be predicted differently; see `copies`."""
        partitions, block_size = self._runs(), self.zenflow_adam.rule.block_size
        found = [name for runs in partitions for name in mixed(runs, block_size)]
        if found and self._start.run.config.overlapped:
            warn_once(
                f"rank {dist.get_rank()}: {len(found)} parameter(s), such as one of shape {found[0]}, of which each "
                f"tensor-parallel rank has a copy share a block of zenflow.block_size = {block_size} elements with "
                "divided ones, so predicted weights of the copies may differ: set zenflow.block_size = "
                f"{largest_block_apart(partitions, block_size)}"
            )

    @property
    @abstractmethod
    def _masters(self) -> list[Any]:
        """DeepSpeed's list of fp32 partitions."""

    @_masters.setter
    @abstractmethod
    def _masters(self, partitions: list[Any]) -> None: ...

    def _holders(self, index: int, ranks: RankGroup) -> RankGroup:
        """The ranks among which the parameters of a partition are divided; `ranks` are all data-parallel ranks."""
        return ranks

    # -- stepping -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _trained(self) -> Iterator[Any]:
        """All parameters that are trained."""

    def recording(self, work: Work) -> AbstractContextManager[None]:
        """Wrap a call that steps, loads, or may reduce gradients; record an exception that leaves it, if it has begun
        to change something."""
        if work is Work.BACKWARD:
            return self._backward_pass.recorded(self._interruption)
        return self._recording_load() if work is Work.LOAD else self._interruption.recorded(work)

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

    def require_steppable(self, managed: bool) -> None:
        """Check, before anything changes, that a step is possible.

        Args:
            managed: whether backward passes, not `step`, complete the gradients.

        Raises:
            ConfigError: a parameter group has a setting with which the worker cannot step.
            StateError: no backward pass since the last step has completed the gradients.
        """
        if self.zenflow_adam.link.failed:  # all ranks get its error
            return
        config = self._start.run.config
        predicts = config.rule == "predictive" and config.overlapped
        self.zenflow_adam.kind.require_steppable(predicts=predicts)
        has_passed = self._backward_pass.passes != self._passes_taken
        if not has_passed or (managed and not self._has_completed):
            raise StateError(
                "step() was called, but no backward pass since the last step has completed the gradients: "
                "call engine.backward(loss) before each step(), with a loss that depends on what "
                "engine(...) returned"
            )

    @property
    def _has_completed(self) -> bool:
        """Whether a step finds gradients after any backward pass since the last step."""
        return True

    def step(self, closure: Any = None) -> None:
        adam, masters = self.zenflow_adam, self._masters
        with self.recording(Work.STEP), self._step.of_optimizer():
            with adam.link.keeping():
                for index, receiver in enumerate(self._step.receivers):
                    receiver.data = self._weights(index)
            # also after an error: unlike masters, they accept gradients on the device
            self._masters = self._step.receivers
            try:
                super().step(closure)
                if self.overflow:
                    with adam.link.keeping():
                        if self._autocast_scale is not None:
                            self._autocast_scale.overflowed()
                    adam.link.raise_kept()
                else:
                    adam.end_step()
            finally:
                self._masters = masters
            self._passes_taken = self._backward_pass.passes

    def get_grad_norm_direct(self, gradients: Sequence[torch.Tensor], params: Any, norm_type: float = 2) -> Any:
        """As in DeepSpeed, but computed from each gradient's norm, which needs no fp64 copy of the gradient."""
        if norm_type == 2:
            norms: list[torch.Tensor] | None = None
            with self.zenflow_adam.link.keeping():
                norms = norm_tensors(gradients, params)
            # If that failed, NaN makes every rank skip the step as an overflow.
            gradients = norms or [
                torch.full((1,), math.nan, dtype=torch.float32, device=grad.device) for grad in gradients
            ]
        return super().get_grad_norm_direct(gradients, params, norm_type)

    def _begin_once(self) -> None:
        """Begin the step if it has not begun. Called as late as possible, because this may wait for the worker."""
        if self._step.begin():
            self.zenflow_adam.begin_step()

    def _find_factor(self, unscale_and_clip: Callable[[torch.Tensor], None]) -> None:
        """Record the factor of the step's gradients: the worker and the estimate apply it."""
        with self.zenflow_adam.link.keeping():
            self._step.find_factor(unscale_and_clip)

    def _optimizer_step(self, index: int) -> None:
        self._begin_once()
        grad_scale = 1.0  # placeholder: without a factor, the step has kept an error
        with self.zenflow_adam.link.keeping():
            grad_scale = self._step.factor
            if self._autocast_scale is not None:
                grad_scale *= self._autocast_scale.factor()
        self.zenflow_adam.step_partition(index, self._masters[index].grad, grad_scale)
        if index == len(self._masters) - 1:
            self.zenflow_adam.finish_weights(starts_copies=not self._waits_after_weights)

    # -- away from the accelerator --------------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload as DeepSpeed does. Masters and moments are on the host already: ``optim_states`` are the landing
        buffers and what the update rule keeps on the accelerator."""
        wanted = {state for state in OffloadStateTypeEnum if include is None or state in include}
        for receiver in self._step.receivers:  # they keep the last step's weights
            receiver.release()
        if OffloadStateTypeEnum.optim_states in wanted:
            self.zenflow_adam.offload(pins=pin_memory)
            self._states_away = True
        wanted -= {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}
        super().offload_states(wanted, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        super().reload_states(non_blocking)
        self.zenflow_adam.reload()
        self._states_away = False

    def require_states_here(self, *states: Any) -> None:
        """Check that nothing is offloaded, or that none of `states` is, and that nothing was interrupted.

        Raises:
            StateError: `offload_states` was called, and `reload_states` was not; or an exception such as
                Ctrl-C has interrupted a step, a backward pass or a load.
        """
        self._require_whole()
        self._require_here(states)

    def settle_masters(self) -> None:
        """Wait on all ranks until p is final, also while states are on the host. A collective.

        Raises:
            StateError: an exception has interrupted a step or a load.
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        self.zenflow_adam.link.home.require()
        self._require_whole(Work.BACKWARD)
        self._drain_together(shows_moments=False)

    @cached_property
    def host_ranks(self) -> RankGroup:
        """The data-parallel ranks, for tensors on the host. The first use is a collective."""
        return communicating_on_host(self.dp_process_group)

    def require_saveable(self) -> None:
        """Like `require_states_here`, but an interrupted backward pass is accepted: it changes nothing
        that is saved."""
        self._require_whole(Work.BACKWARD)
        self._require_here(())

    def require_loadable(self) -> None:
        """Like `require_states_here`, but an interrupted load is accepted: another one writes
        everything that it has."""
        self._require_whole(Work.LOAD)
        self._require_here(())

    def _require_whole(self, *unless: Work) -> None:
        self._backward_pass.notice(self._interruption)
        if not self.zenflow_adam.link.failed:  # otherwise all ranks get its error
            self._interruption.require_none(*unless)

    def _require_here(self, states: Sequence[Any]) -> None:
        moments = {OffloadStateTypeEnum.optim_states} if self._states_away else set()
        away = self.offloaded_states | moments
        if away := away.intersection(states or away):
            raise StateError(
                f"engine.offload_states has moved {', '.join(sorted(state.value for state in away))} to the host: "
                "call engine.reload_states() before the next forward, backward, step, save or load"
            )

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state dict, with p, m, v in their usual places, plus ZenFlow's state."""
        self.zenflow_adam.drain(shows_moments=self._copies_state)
        scale = {} if self._autocast_scale is None else {_AUTOCAST_SCALE: self._autocast_scale.state_dict()}
        with self.zenflow_adam.shown.quiet():
            theirs = tree_map_only(ShownTensor, plain, super().state_dict())
        return {**theirs, checkpoint.STATE_KEY: self._zenflow_state(), **scale}

    def _zenflow_state(self) -> dict[str, Any]:
        """ZenFlow's part of the state dict."""
        return checkpoint.state_of(self.zenflow_adam, copied=self._copies_state)

    @contextmanager
    def state_uncopied(self) -> Iterator[None]:
        """Context in which ZenFlow's part of `state_dict` is not copied, as p, m and v never are: it is valid until the
        next step or load."""
        self._copies_state = False
        try:
            yield
        finally:
            self._copies_state = True

    def load_state_dict(
        self,
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None:
        adam, ranks = self.zenflow_adam, self.zenflow_adam.ranks
        self._drain_together()
        with together(ranks, CheckpointError):
            saved = None if checkpoint_folder else self._read_saved_state(state_dict_list)
        _require_same_position(saved, ranks)
        with adam.shown.quiet():
            super().load_state_dict(
                state_dict_list,
                load_optimizer_states,
                load_from_fp32_weights,
                checkpoint_folder,
                load_serial,
                param_shapes,
            )
        with together(ranks, CheckpointError):
            if load_optimizer_states or checkpoint_folder:
                self._adopt_state()
                exact = checkpoint.restore(adam, saved, f"rank {dist.get_rank()}")
                self._refresh_weights(saved if exact else None)
            else:
                adam.masters_changed()
            if self._autocast_scale is not None and not checkpoint_folder:
                state = state_dict_list[self._dp_ranks.rank] or {}
                self._autocast_scale.load_state_dict(state.get(_AUTOCAST_SCALE, self._autocast_scale.state_dict()))
        if load_optimizer_states or checkpoint_folder:
            with adam.shown.quiet():
                self._exchange_weights(saved if exact else None)

    def _drain_together(self, *, shows_moments: bool = True) -> None:
        """Call `OffloadedAdam.drain` on all ranks; raise on all if any rank's worker has failed. A collective."""
        self.zenflow_adam.link.wait_together()
        with together(self.zenflow_adam.ranks, WorkerError):
            self.zenflow_adam.drain(shows_moments=shows_moments)

    def _read_saved_state(self, state_dict_list: Any) -> SavedState | None:
        """Return this rank's saved ZenFlow state, checked; None if the checkpoint has none."""
        if state_dict_list is None or isinstance(state_dict_list, (str, bytes)):
            return None
        state = state_dict_list[self._dp_ranks.rank]
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the optimizer's state is a {type(state).__name__}, expected a dict: load another checkpoint"
            )
        if checkpoint.STATE_KEY not in state:
            return None
        numels = [state.master.numel() for state in self.zenflow_adam.states]
        saved, layout = read_saved_state(state[checkpoint.STATE_KEY], numels), self.zenflow_adam.kind.layout
        if saved.optimizer != layout.name:
            raise CheckpointError(
                f"the checkpoint's state is that of {saved.optimizer.capitalize()}, this run's optimizer is "
                f"{layout.name.capitalize()}: resume with the optimizer that wrote it, or load only the weights"
            )
        return saved

    def _adopt_state(self) -> None:
        """Copy the moments and step count that DeepSpeed has loaded to the arena."""
        checkpoint.adopt_optimizer_state(self.zenflow_adam)

    @abstractmethod
    def _refresh_weights(self, saved: SavedState | None) -> None:
        """Update this rank's weights after masters were loaded: from the saved state if it has them, otherwise from the
        masters."""

    @abstractmethod
    def _spread_weights(self, values: Sequence[torch.Tensor] | None) -> None:
        """Copy `values`, if given, to this rank's partitions of the weights, and let all ranks have them. A
        collective."""

    def _exchange_weights(self, saved: SavedState | None) -> None:
        """Send the weights to the other ranks if they were not loaded from the checkpoint. May be a collective."""

    def _restore_from_bit16_weights(self) -> None:
        self._drain_together()
        with self.zenflow_adam.shown.quiet():
            super()._restore_from_bit16_weights()
        self.zenflow_adam.masters_changed()

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            self.zenflow_adam.close()


def _require_same_position(saved: SavedState | None, ranks: RankGroup) -> None:
    """Refuse, on every rank, saved states of different runs or steps: the ranks would diverge later."""
    position = (
        None if saved is None else (saved.rule, saved.block_size, saved.updates, saved.position, dict(saved.schedule))
    )
    try:
        require_same_plan("continuing from the checkpoint", position, ranks)
    except PlanMismatchError as error:
        raise agreed(CheckpointError(f"the ranks' saved ZenFlow states do not match: {error}"), ranks) from None
