"""Defines the interface between the optimizer and its update rule, and what the schedules of both
rules share.

`HostOptimizer` takes gradients, hands them over and waits, as the step's plan says. The rule's
schedule makes that plan; the rule computes the weights and keeps its own state between steps.
Methods called inside a step run on this rank alone, between DeepSpeed's collectives, unless
documented as collectives.

A schedule is a state machine over plain values. Overflowed steps neither query nor advance it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.transfers.stream import Predict
from deepspeed_ext.zenflow.worker.messages import WorkerTask


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one optimizer step does.

    Attributes:
        wait: what waits for the worker's results.
        handed_over: gradients handed over in this step: 0 or 1.
        predicts: whether the step computes its weights from y, the result of the update before, and
            an estimate; otherwise they are p, which the worker gives for this step's gradient.
        publish_ahead: whether the next step is predicted, so the worker publishes the extrapolated
            y.
        probes: whether the prediction for the gradient handed over in this step is measured.
        waits_first: whether the update in flight must arrive before this step's weights are
            computed.
    """

    wait: Wait
    handed_over: int = 1
    predicts: bool = False
    publish_ahead: bool = False
    probes: bool = False
    waits_first: bool = True

    @property
    def waits_last(self) -> bool:
        """Whether this step waits for the update that it hands over."""
        return self.wait is Wait.STEP and not self.predicts


class Schedule(ABC):
    """Advances step by step: `plan` describes the coming step, `advance` records that it was
    carried out.

    Attributes:
        state: the position, a frozen dataclass: `steps`, optimizer steps so far, without overflowed
            ones; `written`, gradients handed over so far; and what the rule adds.
        ring: number of slots that gradients take in turn.
    """

    state: Any
    ring: int

    @abstractmethod
    def plan(self) -> Any:
        """What the coming step does: a `StepPlan`."""

    @abstractmethod
    def advance(self, plan: Any) -> None:
        """Record that it was carried out."""

    @property
    @abstractmethod
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start."""

    @property
    def coming(self) -> int:
        """Slot for the coming step's gradient; free once that step has waited."""
        slot: int = self.state.written % self.ring
        return slot

    @property
    def handed_over(self) -> int:
        """Slot of the newest gradient that was handed over, which holds y until the slot's next."""
        slot: int = (self.state.written - 1) % self.ring
        return slot

    @property
    def is_settled(self) -> bool:
        """Whether, after the update in flight has arrived, nothing refers to elements of the
        arena."""
        return True

    def restart(self) -> None:
        """Start over with synchronous steps."""
        self.state = type(self.state)()

    def load(self, state: Any) -> None:
        """Continue from a saved `state`, with the first slot."""
        self.state = replace(state, written=0)


class UpdateRule:
    """Decides what a step does, and computes the weights that are not simply copied from the
    worker. `plan` is what the rule's schedule says of the step.

    Attributes:
        position, values: what a checkpoint holds: the type of the schedule's state, and that of
            each partition's.
    """

    position: ClassVar[type]
    values: ClassVar[type]

    def __init__(
        self,
        plan: ZenFlowPlan,
        schedule: Schedule,
        partitions: Sequence[Partition],
        link: WorkerLink,
        kind: OptimizerKind,
    ) -> None:
        self.block_size = plan.rule.block_size
        self.schedule: Any = schedule
        self._partitions, self._kind = partitions, kind
        self._link, self._metrics = link, link.metrics

    # -- one optimizer step, in this order ---------------------------------------------------------

    def inspect(self) -> None:
        """Inspect the update that has arrived, before the step is planned. Called if the coming
        step waits first. A collective if the schedule asks for it, on every rank or on none."""

    def to_hand_over(
        self, plan: Any, partition: Partition, grad: torch.Tensor, step: Any
    ) -> torch.Tensor | None:
        """What the worker steps with, 1-D [n]; None if the plan hands nothing over. Called first;
        arguments as for `step_partition`."""
        return grad

    def step_partition(
        self, plan: Any, partition: Partition, grad: torch.Tensor, step: Any
    ) -> None:
        """Use the gradient of one partition. If the plan waits first, the update in flight has
        arrived.

        Args:
            grad: 1-D [n], in the dtype of its slot, on the accelerator; neither unscaled nor
                clipped.
            step: its constants, from `OptimizerKind.step`.
        """
        raise NotImplementedError

    def predict(self, partition: Partition) -> Predict:
        """What predicts a partition's weights while the next forward runs, if the plan predicts and
        waits for them in this step or there."""
        raise NotImplementedError

    def task(self, plan: Any, partition: Partition) -> WorkerTask:
        """Build the worker's task from what `to_hand_over` returned."""
        raise NotImplementedError

    def write_weights(self, plan: Any) -> None:
        """Write the weights that `step_partition` could not write and that do not arrive from the
        worker. If the plan waits last, the update handed over in this step has arrived. A
        collective."""

    def end_step(self, plan: Any) -> None:
        """Finish the step: its weights are written and its gradients, if due, are handed over."""

    # -- queries -----------------------------------------------------------------------------------

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        """Tensors that the rule keeps for a partition besides its weights, on any device."""
        return []

    def measurements(self) -> dict[str, float]:
        """The rule's own metrics, by name."""
        return {}

    # -- state -------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Copy state from the accelerator into p, m and v, which others may change afterwards.
        Nothing may be in flight."""

    def resume(self) -> None:
        """Make the worker publish again, because p, m or v may have changed."""
        raise NotImplementedError

    def restart(
        self, counts: Sequence[int] | None, partitions: Sequence[Partition] | None = None
    ) -> None:
        """Discard everything derived from the old p, m, v, which were replaced.

        Args:
            counts: for each partition, number of updates that the new values have had; None: as
                many as the old ones.
            partitions: the partitions from now on, with fewer elements on the host; None: the same.
        """
        if partitions is not None:
            self._partitions = partitions

    def recounted(self, partition: Partition, updates: int) -> None:
        """Count p and the moments of a partition as the result of `updates` updates from now on.
        Nothing may be in flight."""

    def saved(self) -> list[dict[str, Any]]:
        """Return the rule's state for a checkpoint, per partition, besides p, m and v. Nothing may
        be in flight."""
        raise NotImplementedError

    def restore(self, partitions: Sequence[Any]) -> None:
        """Continue from what `saved` returned; p, m, v and the schedule are already in place."""
        raise NotImplementedError
