"""Defines the interface between the optimizer and its update rule: the partitions that both see,
and what the schedules of both rules share.

`HostOptimizer` takes gradients, hands them over and waits, as the step's plan says. The rule's
schedule makes that plan; the rule computes the weights and keeps its own state between steps.
Methods called inside a step run on this rank alone, between DeepSpeed's collectives, unless
documented as collectives.

A schedule is a state machine over plain values. Overflowed steps neither query nor advance it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Place, Places, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.transfers.stream import Predict
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.messages import WorkerTask


@dataclass(frozen=True)
class WholeState:
    """p and the moments of a ZeRO partition of n elements, as DeepSpeed saves, loads and shows
    them. Its first elements may step on the accelerator; the rest is the rule's `Partition`.

    Attributes:
        group: index of its parameter group.
        weights: returns its weights, 1-D [n], in the model's dtype.
        master: p in the arena, 1-D fp32 [n]; a leaf that requires a gradient. Elements that step on
            the accelerator are in it only while they are shown (see `Heads`).
        moments: likewise m and v, or m alone, by their names in the optimizer's state. For codes,
            the arrays that show them (see `StateStore`).
    """

    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """p and the moments, without gradients."""
        return (self.master.detach(), *self.moments.values())


@dataclass
class Partition:
    """The trainer's data of one partition of n elements, for any rule. Elements that step on the
    accelerator are not among them.

    Attributes:
        index: number of the partition.
        group: index of its parameter group.
        weights: returns its weights, 1-D [n], in the model's dtype, which are written in
            place.
        master, moments: p, and m and v or m alone, in the arena, 1-D [n]; owned by the worker while
            an update is in flight.
        scales: scales of m and v, if they are codes, uint8 [ceil(n / block_size)].
        grad_dtype: dtype in which gradients are handed over.
        ring: slots of the gradient ring in the arena, each 1-D [n]. y replaces the newest gradient
            that went into it. Empty if gradients and y pass through the host in chunks.
        places: where its arrays are.
    """

    index: int
    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    grad_dtype: torch.dtype
    ring: list[torch.Tensor]
    places: Places
    scales: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, plan: ZenFlowPlan, index: int, whole: WholeState, arena: Arena) -> Partition:
        """The partition without its head, which steps on the accelerator."""
        layout, head = plan.rule.layout, plan.partitions[index].head
        return cls(
            index,
            whole.group,
            (lambda: whole.weights()[head:]) if head else whole.weights,
            master=arena.tensor("p", index),
            moments=tuple(arena.tensor(kind, index) for kind, _ in layout.moments),
            scales=tuple(arena.tensor(kind, index) for kind in layout.scales),
            grad_dtype=getattr(torch, plan.gradient_dtype),
            ring=[arena.tensor(*key) for key in arena.keys("g", index)],
            places=plan.places,
        )

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """p and the moments."""
        return self.master, *self.moments

    @property
    def device(self) -> torch.device:
        """Where the weights are computed: device of the gradients, and of what the rule keeps."""
        return torch.device("cpu") if self.places.gradient is Place.HOST else self.weights().device


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
            grad: 1-D [n], in the dtype of its slot, on the partition's device; neither unscaled
                nor clipped.
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
