"""What an update rule decides, and what the optimizer asks of it.

`OffloadedAdam` collects gradients, hands them over and waits, as the plan of the step says. The rule makes that plan,
computes weights and keeps what it needs between steps. Methods called inside a step run on this rank alone, between
collectives of DeepSpeed, unless their text says that they are collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from deepspeed_ext.zenflow.metrics import Metrics
from deepspeed_ext.zenflow.partition import GradFactor, Partition
from deepspeed_ext.zenflow.schedule import Schedule, StepPlan
from deepspeed_ext.zenflow.worker.link import WorkerLink
from deepspeed_ext.zenflow.worker.messages import WorkerTask

__all__ = ["RuleSettings", "UpdateRule"]

CONVERTED_NUMEL = 1 << 24
"""Elements that are converted at once on their way from the arena to the weights."""

PlanT = TypeVar("PlanT", bound=StepPlan)


class RuleSettings(Protocol):
    """What must be known of a rule before there is an arena."""

    @property
    def update_interval(self) -> int | None:
        """Optimizer steps handed over together; None: chosen by measurement."""

    @property
    def block_size(self) -> int:
        """Elements of a block; the worker cuts its work at ends of blocks."""

    @property
    def slots(self) -> int:
        """Of the gradient ring; an interval that is chosen later may need all of them."""

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """Kind and dtype of the array with an entry for every block, and whether it goes to the accelerator."""


class UpdateRule(ABC, Generic[PlanT]):
    """Decides what a step does, and computes the weights that no worker has computed yet.

    Args:
        block_size: elements of a block.
        schedule: which step does what.
        partitions: of this rank, in order.
        link: to the worker.
        metrics: take what is measured here.

    Attributes:
        name: in configs and checkpoints.
        shows_collected: the update count to show with p, m, v counts collected gradients too.
        block_size, schedule: as given.
    """

    name: ClassVar[str]
    shows_collected: ClassVar[bool]

    def __init__(
        self,
        block_size: int,
        schedule: Schedule[PlanT, Any],
        partitions: Sequence[Partition],
        link: WorkerLink,
        metrics: Metrics,
    ) -> None:
        self.block_size = block_size
        self.schedule = schedule
        self._partitions = partitions
        self._link = link
        self._metrics = metrics

    # -- one optimizer step, in this order ------------------------------------------------------------------------

    @abstractmethod
    def step_partition(self, plan: PlanT, partition: Partition, grad: torch.Tensor, factor: GradFactor) -> None:
        """Use the gradient of a partition, which is collected already; if the plan waits first, the update in flight
        has arrived.

        Args:
            grad: 1-D [n], in the dtype of its slot, on the accelerator; neither unscaled nor clipped.
        """

    @abstractmethod
    def task(self, plan: PlanT, partition: Partition) -> WorkerTask:
        """The worker's task with the collected gradients of a partition, which are thereby handed over."""

    @abstractmethod
    def write_weights(self, plan: PlanT) -> None:
        """Write the weights that `step_partition` could not write; if the plan waits last, the update that it handed
        over has arrived. A collective."""

    def end_step(self, plan: PlanT) -> None:
        """The weights are written and what was due is handed over."""

    @abstractmethod
    def measured_interval(self, plan: PlanT) -> int | None:
        """After the step: the interval that was left open, once enough is known, the same on every rank. A collective
        if the schedule says so; it says the same on every rank."""

    # -- what others must know of it ------------------------------------------------------------------------------

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients may leave for the host during backward."""
        return False

    def changed_blocks(self, plan: PlanT, partition: Partition) -> Any:
        """The `BlockSet` whose weights the step changes; None: all may change."""
        return None

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        """What the rule keeps of a partition beside its weights, on any device."""
        return []

    def measurements(self) -> dict[str, float]:
        """Metrics of the rule alone, by name."""
        return {}

    # -- state ----------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Nothing is in flight: copy state that lives on the accelerator into p, m and v."""

    @abstractmethod
    def resume(self) -> None:
        """p, m, v may be others than before: let the worker publish again what is due."""

    @abstractmethod
    def restart(self, updates: int | None) -> None:
        """p, m, v are others than before: forget what followed from the old ones.

        Args:
            updates: how many updates they have had; None: as many as before.
        """

    @abstractmethod
    def saved(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a checkpoint holds of the rule itself, and of each partition beside p, m, v and collected gradients;
        nothing is in flight."""

    @abstractmethod
    def changed_setting(self, schedule: Mapping[str, Any], position: int) -> str | None:
        """The setting under which a checkpoint with this schedule cannot be continued to the bit; None: it can."""

    @abstractmethod
    def restore(self, values: Any, partitions: Sequence[Any]) -> None:
        """Continue where `saved` was taken; p, m, v, schedule and collected gradients are in place."""

    # -- for the rules --------------------------------------------------------------------------------------------

    def _slots(self, count: int) -> tuple[int, ...]:
        """Inside a step: the slots of the last `count` gradients, this step's the last of them."""
        return (*self.schedule.latest(count - 1), self.schedule.coming)

    def _interval_fits(self, here: int | None, there: int | None, most: int) -> bool:
        """Whether a checkpoint at interval `there` continues where `here` is set; None: it is left open."""
        return here == there or (here is None and (there or 1) <= most)

    def _take_published(self, partition: Partition) -> None:
        """Copy what the worker has published of a partition to its weights."""
        published, weights = partition.published, partition.weights()
        # A copy that converts has a temporary of the published dtype on the accelerator: a part at a time bounds it.
        part_numel = published.numel() if published.dtype == weights.dtype else CONVERTED_NUMEL
        for part, arrived in zip(weights.split(part_numel), published.split(part_numel), strict=True):
            part.copy_(arrived, non_blocking=True)
        self._metrics.bytes_up += published.nbytes
