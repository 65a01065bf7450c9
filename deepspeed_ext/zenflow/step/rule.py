"""Defines the interface between the optimizer and its update rule.

`HostOptimizer` takes gradients, hands them over and waits, as the step's plan says. The rule makes
that plan, computes the weights and keeps its own state between steps. Methods called inside a step
run on this rank alone, between DeepSpeed's collectives, unless documented as collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.step.schedule import Schedule
from deepspeed_ext.zenflow.transfers.stream import Predict
from deepspeed_ext.zenflow.worker.messages import WorkerTask

__all__ = ["UpdateRule"]


class UpdateRule:
    """Decides what a step does, and computes the weights that are not simply copied from the
    worker. `plan` is what the rule's schedule says of the step.

    Args:
        schedule: decides what each step does.

    Attributes:
        name: the rule's name in configs and checkpoints.
    """

    name: ClassVar[str]

    def __init__(
        self,
        block_size: int,
        schedule: Schedule,
        partitions: Sequence[Partition],
        link: WorkerLink,
        metrics: Metrics,
    ) -> None:
        self.block_size = block_size
        self.schedule: Any = schedule
        self._partitions = partitions
        self._link = link
        self._metrics = metrics

    # -- one optimizer step, in this order ---------------------------------------------------------

    def inspect(self) -> None:
        """Inspect the update that has arrived, while its gradients are still in their slots, before
        the step is planned. Called if the coming step waits first. A collective if the schedule
        asks for it, on every rank or on none."""

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
            step: its constants, made by `OptimizerKind.step`; they have the factor.
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
        """Metrics of the rule itself, by name."""
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
