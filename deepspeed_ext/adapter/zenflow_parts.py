"""Builds what a ZeRO optimizer needs to run in a process of its own: plain objects, to which the
subclasses of DeepSpeed's optimizers forward. No method body of DeepSpeed is copied."""

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
        state: what is saved, loaded and exported.
        readiness: which calls may go on.
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
        host = start_optimizer(start, zero.optimizer, groups, weights, caller, ranks, holders)
        if start.run.config.overlapped:
            _warn_of_mixed_blocks(partitions, host.rule.block_size)
        scaler = zero.torch_autocast_gradscaler
        scale = None if scaler is None else AutocastScale(scaler)
        driver = StepDriver(host, partitions, scale)
        backward_pass = BackwardPass(partial(_begin_backward, zero, host), partitions.trained)
        readiness = Readiness(
            host,
            start.run.config,
            backward_pass,
            offloaded=lambda: zero.offloaded_states,
            has_gradients=lambda: driver.gradients is not None or partitions.has_gradients,
        )
        state = ReachedState(host, partitions, ranks, scale)
        return cls(host, driver, state, readiness, backward_pass)

    def settle_masters(self) -> None:
        """Wait on all ranks until p is final, also while states are on the host. A collective.

        Raises:
            StateError: an exception has interrupted a step or a load.
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        self.host.link.home.require()
        self.readiness.require_whole(Work.BACKWARD)
        self.state.drain_together(shows_moments=False)

    def offload(self, include: Container[Any] | None, *, pins: bool) -> set[Any]:
        """Free what is held on the accelerator between steps, if `include` has the optimizer's
        states. Masters and moments are on the host already.

        Args:
            include: DeepSpeed's states; None: all.
            pins: whether copies on the host are page-locked, if possible.

        Returns:
            The states that are left to DeepSpeed.
        """
        self.host.complete_weights()
        wanted = {state for state in OffloadStateTypeEnum if include is None or state in include}
        for receiver in self.driver.current.receivers:  # they keep the last step's weights
            receiver.release()
        if OffloadStateTypeEnum.optim_states in wanted:
            self.host.offload(pins=pins)
        return wanted - {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}


def zenflow_of(optimizer: Any) -> ZenFlowParts | None:
    """The parts of an engine's optimizer; None: it does not run in a process of its own."""
    parts = getattr(optimizer, "zenflow_parts", None)
    return parts if isinstance(parts, ZenFlowParts) else None


def _begin_backward(zero: Any, host: HostOptimizer) -> None:
    """Called before a backward pass. Weights arrive until then, those that forward has not used
    among them: gradients go to slots where y of these may be."""
    zero.clear_backward_seen_flag()
    host.complete_weights()


def _warn_of_mixed_blocks(partitions: ZeroPartitions, block_size: int) -> None:
    """Warn of copies on tensor-parallel ranks that would be predicted differently; see `copies`."""
    runs_of_all = partitions.runs()
    if found := [name for runs in runs_of_all for name in mixed(runs, block_size)]:
        warn_once(
            f"rank {dist.get_rank()}: {len(found)} parameter(s), such as one of shape {found[0]}, "
            "of which each tensor-parallel rank has a copy share a block of zenflow.block_size = "
            f"{block_size} elements with divided ones, so predicted weights of the copies may "
            f"differ: set zenflow.block_size = {largest_block_apart(runs_of_all, block_size)}"
        )
