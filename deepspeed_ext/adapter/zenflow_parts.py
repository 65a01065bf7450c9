"""Builds the objects that run a ZeRO optimizer in a separate process, to which our subclasses of
DeepSpeed's optimizers forward."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed_ext.adapter.reached_state import ReachedState
from deepspeed_ext.adapter.readiness import BackwardPass, Readiness, Work
from deepspeed_ext.adapter.step import AutocastScale, StepDriver
from deepspeed_ext.adapter.upstream import OffloadStateTypeEnum, later_groups
from deepspeed_ext.adapter.zero_partitions import ZeroPartitions
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.ranks import RankGroup, open_communicators
from deepspeed_ext.runtime.words import counted
from deepspeed_ext.zenflow.start import ZenFlowStart, start_optimizer
from deepspeed_ext.zenflow.step.copies import largest_block_apart, mixed
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.supported import require_publishable

__all__ = ["ZenFlowParts", "zenflow_of"]


@dataclass(frozen=True)
class ZenFlowParts:
    """The parts of one ZeRO optimizer.

    Attributes:
        host: owns the optimizer process, the arena and the partitions in it.
        driver: drives a step.
        state: saves, loads and exports state.
        readiness: decides which calls may run.
        backward_pass: DeepSpeed's state of a backward pass.
    """

    host: HostOptimizer
    driver: StepDriver
    state: ReachedState
    readiness: Readiness
    backward_pass: BackwardPass

    @classmethod
    def start(cls, zero: Any, partitions: ZeroPartitions, start: ZenFlowStart) -> ZenFlowParts:
        """Start the optimizer process. A collective.

        Args:
            zero: DeepSpeed's optimizer, whose partitions these are.
        """
        ranks = RankGroup.of(zero.dp_process_group, keeps_scratch=True)
        caller, groups = partitions.caller(ranks.size), partitions.groups
        require_publishable(start.run.config, caller.weights_dtype)
        holders = [partitions.holders(index, ranks) for index in range(len(groups))]
        others = [RankGroup.of(group) for group in later_groups(zero)]
        open_communicators([start.ranks, ranks, *holders, *others])
        weights = partitions.weights
        host = start_optimizer(start, zero.optimizer, groups, weights, caller, ranks)
        if start.run.config.overlapped:
            _warn_of_mixed_blocks(partitions, host.rule.block_size)
        scaler = zero.torch_autocast_gradscaler
        scale = None if scaler is None else AutocastScale(scaler)
        driver = StepDriver(host, partitions, scale)
        backward_pass = BackwardPass(partial(_begin_backward, zero), partitions.trained)
        readiness = Readiness(
            host,
            start.run.config,
            backward_pass,
            offloaded=lambda: zero.offloaded_states,
            has_gradients=lambda: driver.gradients is not None or partitions.has_gradients,
        )
        state = ReachedState(host, partitions, ranks, scale, readiness.require_groups)
        return cls(host, driver, state, readiness, backward_pass)

    @property
    def moments(self) -> list[str]:
        """Names of the moments in the optimizer's state."""
        return [name for _, name in self.host.kind.layout.moments]

    def settle_masters(self) -> None:
        """Wait on all ranks until p is final, also while states are offloaded. A collective.

        Raises:
            StateError: an exception has interrupted a step or a load.
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        self.host.link.home.require()
        self.readiness.require_whole(Work.BACKWARD)
        self.state.drain_together(shows_moments=False)

    def offload(self, include: Container[Any] | None, *, pins: bool) -> set[Any]:
        """If `include` has the optimizer states, free what ZenFlow holds on the accelerator between
        steps; masters and moments are on the host anyway.

        Args:
            include: DeepSpeed's states; None: all.
            pins: whether copies on the host are page-locked, if possible.

        Returns:
            The states that are left to DeepSpeed.
        """
        self.state.complete_weights()
        wanted = {state for state in OffloadStateTypeEnum if include is None or state in include}
        for receiver in self.driver.current.receivers:  # they keep the last step's weights
            receiver.release()
        if OffloadStateTypeEnum.optim_states in wanted:
            self.host.offload(pins=pins)
        return wanted - {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}


def zenflow_of(optimizer: Any) -> ZenFlowParts | None:
    """The parts of an engine's optimizer; None: it is not a ZenFlow optimizer."""
    parts = getattr(optimizer, "zenflow_parts", None)
    return parts if isinstance(parts, ZenFlowParts) else None


def _begin_backward(zero: Any) -> None:
    """Before a backward pass, complete all weights, also those that forward has not used: gradients
    go to slots in which their y may still be."""
    zero.clear_backward_seen_flag()
    parts: ZenFlowParts = zero.zenflow_parts
    parts.state.complete_weights()


def _warn_of_mixed_blocks(partitions: ZeroPartitions, block_size: int) -> None:
    """Warn of replicated parameters that tensor-parallel ranks would predict differently; see
    `copies`."""
    runs_of_all = partitions.runs()
    if found := [name for runs in runs_of_all for name in mixed(runs, block_size)]:
        warn_once(
            f"rank {dist.get_rank()}: {counted(len(found), 'replicated parameter')}, such as one "
            f"of shape {found[0]}, share a block of zenflow.block_size = {block_size} elements "
            "with sharded ones, so tensor-parallel ranks may predict different weights for them: "
            f"set zenflow.block_size = {largest_block_apart(runs_of_all, block_size)}"
        )
