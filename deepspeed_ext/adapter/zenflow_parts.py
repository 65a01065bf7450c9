"""Builds the objects that run a ZeRO optimizer in a separate process, to which our subclasses of
DeepSpeed's optimizers forward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from deepspeed_ext.adapter.gradients import HostGradients
from deepspeed_ext.adapter.reached_state import ReachedState
from deepspeed_ext.adapter.readiness import BackwardPass, Readiness, Work
from deepspeed_ext.adapter.step import AutocastScale, StepDriver
from deepspeed_ext.adapter.upstream import (
    OffloadStateTypeEnum,
    Swap,
    ZeROOptimizer,
    is_model_parallel_parameter,
    later_groups,
    swapped,
)
from deepspeed_ext.adapter.zero_partitions import ZeroPartitions
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import counted, warn_once
from deepspeed_ext.runtime.ranks import RankGroup, open_communicators, together
from deepspeed_ext.zenflow.start import ZenFlowStart, start_optimizer

_registrations = 0
"""Number of modules and parameters that were registered in any module since it is counted."""


@functools.cache
def _count_registrations() -> None:
    def count(module: torch.nn.Module, name: str, value: Any) -> None:
        global _registrations
        _registrations += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)


class ZenFlowParts:
    """The parts of one of DeepSpeed's ZeRO optimizers, and `weight_stream`'s streams of its
    weights. Making them starts the optimizer process; a collective."""

    def __init__(self, zero: Any, partitions: ZeroPartitions, start: ZenFlowStart) -> None:
        ranks = RankGroup.of(zero.dp_process_group, keeps_scratch=True)
        caller, groups = partitions.caller(ranks.size), partitions.groups
        holders = [partitions.holders(index, ranks) for index in range(len(groups))]
        others = [RankGroup.of(group) for group in later_groups(zero)]
        open_communicators([start.ranks, ranks, *holders, *others])
        weights = partitions.weights
        self.partitions = partitions
        self.host = host = start_optimizer(start, zero.optimizer, groups, weights, caller, ranks)
        if start.config.overlapped:
            _warn_of_shared_blocks(partitions, host.rule.block_size)
        scaler = zero.torch_autocast_gradscaler
        scale = None if scaler is None else AutocastScale(scaler)
        self.driver = driver = StepDriver(host, partitions, scale)
        self.backward_pass = BackwardPass(partial(_begin_backward, zero))
        self.readiness = Readiness(
            host,
            start.config,
            self.backward_pass,
            offloaded=lambda: zero.offloaded_states,
            has_gradients=lambda: driver.gradients is not None or partitions.has_gradients,
        )
        self.state = ReachedState(host, partitions, ranks, scale, self.readiness)
        self.streams: list[Any] = []
        _count_registrations()
        self._trained = frozenset(map(id, partitions.trained()))
        self._untrained: list[tuple[str, torch.nn.Parameter]] = []
        self._walked_at = -1

    def require_steppable(self, module: torch.nn.Module, managed: bool) -> None:
        """Warn of untrained parameters, then check as `Readiness.require_steppable` does."""
        self._warn_of_untrained(module)
        self.readiness.require_steppable(managed)

    def _warn_of_untrained(self, module: torch.nn.Module) -> None:
        """Warn of parameters with gradients that no step uses, once for each set of them: what is
        trained was decided at ``deepspeed.initialize``. Walking a model of many thousand parameters
        takes milliseconds, so it is walked again only if one was registered somewhere."""
        if self._walked_at != _registrations:
            self._walked_at = _registrations
            named = module.named_parameters()
            self._untrained = [each for each in named if id(each[1]) not in self._trained]
        if names := [name for name, p in self._untrained if p.grad is not None and p.requires_grad]:
            warn_once(
                f"{counted(len(names), 'parameter')} of the model, such as {names[0]}, got a "
                "gradient but will not change: what is trained was decided when the engine was "
                "built. Change the model before deepspeed.initialize; what is frozen only later, "
                "or for some steps, must require gradients there"
            )

    def require_known_state(self, first: Callable[[], None] = lambda: None) -> None:
        """Check, before anything changes, that the user's changes of the optimizer's state can be
        taken over, after another check. A collective.

        Raises:
            StateError: on every rank, if any rank's changes cannot; see `StateStore.changes`.
        """
        with together(self.host.ranks, otherwise=None):
            first()
            if not self.host.link.failed:  # otherwise all ranks get its error
                self.host.state.checked = self.host.state.changes()

    def begin_call(self) -> None:
        """Begin a call of the engine. A collective while weights are streamed.

        Raises:
            StateError: this is a forked process; the engine belongs to its parent.
        """
        self.host.link.home.require()
        self.streams[:] = [each for each in self.streams if each.agree()]

    def settle_masters(self) -> None:
        """Wait on all ranks until p is final, also while states are offloaded. A collective.

        Raises:
            StateError: an exception has interrupted a step or a load.
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        self.begin_call()
        self.readiness.require_whole(Work.BACKWARD)
        self.state.drain_together(shows=False)

    def offload(self, include: Container[Any] | None, *, pins: bool) -> set[Any]:
        """If `include` (None: all) has the optimizer states, free what ZenFlow holds on the
        accelerator between steps, with copies on the host that are page-locked if it `pins`;
        masters and moments are there anyway. Return the states that are left to DeepSpeed."""
        self.host.complete_weights()
        wanted = {state for state in OffloadStateTypeEnum if include is None or state in include}
        for receiver in self.driver.receivers:  # they keep the last step's weights
            receiver.release()
        if OffloadStateTypeEnum.optim_states in wanted:
            self.host.offload(pins=pins)
        return wanted - {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}


class StepsInProcess(ZeROOptimizer):
    """What the subclasses of DeepSpeed's ZeRO optimizers forward to `ZenFlowParts` at every
    stage."""

    zenflow_parts: ZenFlowParts

    def _begin(self, parts: ZenFlowParts) -> None:
        """Forward to `parts` from now on."""
        self.zenflow_parts = parts
        self.host_optimizer, self.exact_weights = parts.host, parts.state.exact_weights
        self._backward_hook_state = parts.backward_pass

    @property
    def _host_gradients(self) -> HostGradients | None:
        return self.zenflow_parts.driver.gradients

    def reset_cpu_buffers(self) -> None:
        super().reset_cpu_buffers()
        if self._host_gradients is not None:
            with self.host_optimizer.link.deferring_errors():
                self._host_gradients.forget()

    def _step(self, super_call: Callable[[], None], *swaps: Swap) -> None:
        """Step, with `swaps` for DeepSpeed's."""
        parts = self.zenflow_parts
        with parts.readiness.recording(Work.STEP), swapped(*swaps):
            parts.driver.run(super_call, lambda: self.overflow)
            parts.readiness.took_gradients()
            self.exact_weights.remember()

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: float = 2) -> Any:
        """DeepSpeed's norm, computed from each gradient's norm without fp64 copies."""
        if norm_type == 2:
            gradients = self.zenflow_parts.driver.norms(gradients, params)
        return super().get_grad_norm_direct(gradients, params, norm_type)

    def _optimizer_step(self, index: int) -> None:
        self.zenflow_parts.driver.take(index)

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state dict, with p, m, v under their usual keys, plus ZenFlow's state."""
        return self.zenflow_parts.state.saved(super().state_dict)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint; arguments as in DeepSpeed. A collective."""
        self.zenflow_parts.state.load(super().load_state_dict, *args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        self.zenflow_parts.state.take_from_weights(super()._restore_from_bit16_weights)

    def measurements(self) -> dict[str, float]:
        return self.host_optimizer.measurements()

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            self.host_optimizer.close()


def zenflow_of(optimizer: Any) -> ZenFlowParts | None:
    """The parts of an engine's optimizer; None: it is not a ZenFlow optimizer."""
    parts = getattr(optimizer, "zenflow_parts", None)
    return parts if isinstance(parts, ZenFlowParts) else None


def _begin_backward(zero: Any) -> None:
    """Before a backward pass, complete all weights, also those that forward has not used: gradients
    go to slots in which their y may still be."""
    zero.clear_backward_seen_flag()
    parts: ZenFlowParts = zero.zenflow_parts
    parts.host.complete_weights()


def _warn_of_shared_blocks(partitions: ZeroPartitions, block_size: int) -> None:
    """Warn if tensor-parallel ranks would predict copies of a parameter differently. An element's
    estimate depends on the mean of v over its block, which is another one on each rank if the block
    also holds elements of a sharded parameter."""
    if len({is_model_parallel_parameter(param) for param in partitions.trained()}) < 2:
        return
    apart = math.gcd(block_size, *(place.begin for place in partitions.places().values()))
    if apart < block_size:
        warn_once(
            f"rank {dist.get_rank()}: parameters share a block of zenflow.block_size = "
            f"{block_size} elements, so tensor-parallel ranks may predict copies of a parameter "
            f"differently: set zenflow.block_size = {apart}"
        )
