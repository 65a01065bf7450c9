"""The optimizer as the ZeRO subclasses see it: gradients of partitions go in, weights come out.

The subclass of DeepSpeed's optimizer owns parameters and communication. `OffloadedAdam` owns what both update rules
share, that is the state of partitions, the link to the worker, and the figures; `PredictiveAdam` and `SelectiveAdam`
are the rules. One optimizer step is `begin_step`, `step_partition` for each partition in order, `end_step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from deepspeed_ext._agreement import RankGroup, require_same_plan
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.adam_settings import adam_step, is_decoupled, step_value
from deepspeed_ext.zenflow.figures import Figures
from deepspeed_ext.zenflow.kernel import AdamStep
from deepspeed_ext.zenflow.link import WorkerLink
from deepspeed_ext.zenflow.messages import array_name, partition_specs
from deepspeed_ext.zenflow.partition import GradFactor, PartitionState
from deepspeed_ext.zenflow.schedule import Schedule
from deepspeed_ext.zenflow.seat import WorkerSeat
from deepspeed_ext.zenflow.transfers import Streamed

__all__ = ["MEASURED_INTERVAL_LIMIT", "OffloadedAdam"]

MEASURED_INTERVAL_LIMIT = 8
"""The longest interval that is chosen where none is given: gradients of that many steps must find room."""
CONVERTED_NUMEL = 1 << 24
"""Elements that are converted at once on their way from the arena to the weights."""


P = TypeVar("P", bound=PartitionState)


class OffloadedAdam(ABC, Generic[P]):
    """Adam in a process of its own.

    Args:
        masters: fp32 values to start from, one tensor a partition; copied into the arena.
        groups: index of the parameter group of each partition.
        weights: returns the 16-bit weights of a partition, 1-D, on whatever device; written in place.
        optimizer: holds hyperparameters and, for checkpoints, state; it never moves a weight itself.
        weights_dtype: of the weights.
        grad_dtype: of the gradients as they are handed over.
        settings: the ``zenflow`` section.
        ranks: the data-parallel ranks; all of them make one of these, with partitions in the same order.
        seat: where the worker runs.

    Attributes:
        partitions: their state, in order.
        updates: optimizer steps whose gradient has been taken so far (t of the newest).
        ranks: as given.
        schedule, figures, link: see there.
        rule: its name in configs and checkpoints.
        per_block: kind and dtype of the array in which the rule keeps a value for every block.

    Raises:
        ConfigError: the optimizer is not an Adam.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena.
        WorkerError: the worker does not start, or another rank has one of these errors.
    """

    rule: ClassVar[str]
    per_block: ClassVar[tuple[str, str]]
    schedule: Schedule[Any, Any]

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        groups: Sequence[int],
        weights: Callable[[int], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        weights_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        settings: ZenFlowConfig,
        ranks: RankGroup,
        seat: WorkerSeat,
    ) -> None:
        self._optimizer = optimizer
        self._decoupled = is_decoupled(optimizer)
        self._weights = weights
        self._settings = settings
        self.ranks = ranks
        self._exposed = False
        self.figures = Figures()
        self.updates = 0
        agreed = (settings.model_dump(exclude={"pt_reserved_cores", "pt_reserved_cores_perc"}), list(groups))
        require_same_plan("ZenFlow", agreed, ranks)
        self.link = self._open([master.numel() for master in masters], weights_dtype, grad_dtype, seat)
        self.partitions: list[P] = [self._partition(index, group) for index, group in enumerate(groups)]
        for partition, master in zip(self.partitions, masters, strict=True):
            partition.master.data.copy_(master)
        self.bind_state()

    # -- what a rule says -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Elements of a block of the partition; ends of blocks are where the worker may cut."""

    @property
    @abstractmethod
    def _room(self) -> int:
        """For how many gradients of a partition there is room; an interval that is measured may need all of it."""

    @abstractmethod
    def _partition(self, index: int, group: int) -> P:
        """The state of a partition, around its arrays."""

    @abstractmethod
    def _start_step(self) -> None:
        """Ask the schedule what this step does, and wait for the update in flight if that needs it."""

    @abstractmethod
    def _step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        """Take the gradient of a partition, on this rank alone: no collective."""

    @abstractmethod
    def _finish_partitions(self) -> None:
        """All gradients have been taken: wait for the worker if the plan says so, and write what is left to write.
        Collectives come first, or every rank reaches them."""

    def coming_slot(self, index: int) -> torch.Tensor:
        """Where the step's gradient of a partition belongs; 1-D, n elements, in the arena. Free after `begin_step`."""
        return self.partitions[index].ring[self.schedule.coming]

    @abstractmethod
    def _finish_step(self) -> None:
        """Hand over what the schedule says, on this rank alone."""

    @abstractmethod
    def _advance(self) -> None:
        """The step has been made: advance the schedule, and settle an interval that was left open. A collective."""

    @abstractmethod
    def state_beside_weights(self, index: int) -> list[torch.Tensor]:
        """What the rule keeps of a partition beside its weights, wherever that is."""

    def collected_gradients(self, index: int) -> list[torch.Tensor]:
        """Between steps: the gradients of a partition that are not handed over, in the arena, in order."""
        partition = self.partitions[index]
        return [partition.ring[place] for place in self.schedule.latest(len(partition.collected))]

    def _places(self, count: int) -> tuple[int, ...]:
        """Inside a step: the places in the ring of the last `count` gradients, this step's the last of them."""
        return (*self.schedule.latest(count - 1), self.schedule.coming)

    def _ring(self, index: int) -> list[torch.Tensor]:
        return [self.link.arena.tensor(array_name("g", index, place)) for place in range(self._room)]

    @abstractmethod
    def saved_partition(self, index: int) -> dict[str, Any]:
        """What a checkpoint holds of a partition beside p, m, v and collected gradients; nothing is in flight."""

    @abstractmethod
    def restore_partition(self, index: int, values: Any) -> None:
        """Continue where `saved_partition` was taken; p, m, v, schedule and collected constants are in place."""

    @abstractmethod
    def resume(self) -> None:
        """p, m, v may be others than before: let the worker publish again what was on its way."""

    def begin_step(self) -> None:
        """An optimizer step that will be applied begins; waits for the update in flight if the weights need it.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        with self.link.keeping():
            self.figures.begin_step()
        if self._exposed:
            self._exposed = False
            self.link.wait()
            with self.link.keeping():
                self.resume()
        self._start_step()

    def step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        """Take the gradient of a partition. With the last one the new weights of all of them have been written.

        Args:
            index: of the partition; all of them, in order, between `begin_step` and `end_step`.
            grad: 1-D, n elements, reduced, neither unscaled nor clipped; may be reused after the call.
            factor: what it is to be multiplied with.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        # Also if the worker has failed: until all ranks wait together, weights that need nothing of it stay right.
        with self.link.keeping():
            self._step_partition(index, grad, factor)
        if index == len(self.partitions) - 1:
            self._finish_partitions()

    def end_step(self) -> None:
        """Hand over what the schedule says. Does not wait for the worker."""
        with self.link.keeping():
            self._finish_step()
        self._advance()
        self.updates += 1
        with self.link.keeping():
            # No parameter has a gradient, so nothing moves: schedulers and step hooks see the step that they wait for.
            self._optimizer.step()
            self.figures.end_step()

    # -- for the rules --------------------------------------------------------------------------------------------

    def _open(
        self, numels: Sequence[int], weights_dtype: torch.dtype, grad_dtype: torch.dtype, seat: WorkerSeat
    ) -> WorkerLink:
        """Start the worker with the arrays of partitions of `numels` elements."""
        of_partitions = [
            partition_specs(
                index,
                numel,
                block_size=self.block_size,
                publish_dtype=_name(self._settings.publish_dtype or weights_dtype),
                grad_dtype=_name(grad_dtype),
                ring=self._room,
                per_block=self.per_block,
            )
            for index, numel in enumerate(numels)
        ]
        names = [spec.name for specs in of_partitions for spec in specs]
        # Room for an interval that is not chosen yet is touched, and so takes memory, only once it is used.
        known = self._settings.update_interval is not None
        touch = [name for name in names if known or not name.startswith("g.") or name.endswith(".0")]
        return WorkerLink(
            [spec for specs in of_partitions for spec in specs],
            touch,
            [name for name in touch if name.startswith(("y.", "g.", "block_means."))],
            block_size=self.block_size,
            seat=seat,
            ranks=self.ranks,
            timeout_seconds=self._settings.worker_timeout_seconds,
            figures=self.figures,
        )

    def _array(self, kind: str, index: int) -> torch.Tensor:
        return self.link.arena.tensor(array_name(kind, index))

    def _collect(self, index: int, grad: torch.Tensor, factor: float) -> torch.Tensor:
        """Copy `grad` to its slot unless it is there; note its constants and return it in the slot's dtype."""
        partition, slot = self.partitions[index], self.coming_slot(index)
        if grad.dtype != slot.dtype:
            grad = grad.to(slot.dtype)
        if not partition.streamed.is_complete and grad.data_ptr() != slot.data_ptr():
            self.link.transfers.to_host(grad, slot)
            self.link.transfers.wait_for_older()  # else flat gradients pile up while the host runs ahead of the link
        partition.streamed = Streamed()
        self.figures.bytes_down += slot.nbytes
        partition.collected.append(self._constants(partition.group, self.updates + 1, factor))
        return grad

    def _constants(self, group: int, step: int, grad_scale: float) -> AdamStep:
        return adam_step(self._optimizer.param_groups[group], self._decoupled, step, grad_scale)

    def _take_published(self, index: int) -> None:
        """Copy what the worker has published of a partition into its weights."""
        published, weights = self.partitions[index].published, self._weights(index)
        # A copy that converts has a temporary of the published dtype on the accelerator: a part at a time bounds it.
        part_numel = published.numel() if published.dtype == weights.dtype else CONVERTED_NUMEL
        for part, arrived in zip(weights.split(part_numel), published.split(part_numel), strict=True):
            part.copy_(arrived, non_blocking=True)
        self.figures.bytes_up += published.nbytes

    def _choose_interval(self, interval: int) -> None:
        self.schedule.choose_interval(interval)
        self._lock_ring()

    def _lock_ring(self) -> None:
        """Page-lock what of the ring is in use, which is not known before the interval is."""
        places = range(min(self._room, self.schedule.ring))
        self.link.lock([array_name("g", index, place) for index in range(len(self.partitions)) for place in places])

    # -- state ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until p, m, v hold every gradient that was handed over. Changes nothing about what follows.

        Raises:
            WorkerError: this rank's worker has failed.
        """
        if (error := self.link.wait()) is not None:
            raise error

    def expose(self) -> bool:
        """p, m, v are about to be read or written from outside: `drain`, and let the next step follow from them.

        If nothing is written, that step is bitwise unchanged; it costs one more pass of the worker.

        Returns:
            False if this rank's worker has failed, which the next step raises on every rank: the caller may be inside
            a collective.
        """
        with self.link.keeping():
            self.drain()
        self._exposed = True
        return not self.link.failed

    def bind_state(self) -> None:
        """Let the optimizer's state be the arena's p, m, v, under the masters as parameters."""
        for partition, updates in zip(self.partitions, self._bound_updates, strict=True):
            self._optimizer.state[partition.master] = {
                "step": step_value(self._optimizer, updates),
                "exp_avg": partition.exp_avg,
                "exp_avg_sq": partition.exp_avg_sq,
            }

    def load_schedule(self, state: dict[str, Any]) -> None:
        """Continue at the position that the schedule's `state_dict` holds."""
        self.schedule.load_state_dict(state)
        self._lock_ring()

    def adopt_update_count(self, updates: int) -> None:
        """p, m, v in the arena are those after that many updates."""
        self.updates = updates

    def can_use_interval(self, interval: int | None) -> bool:
        """Whether a run at `interval` can continue under these settings; where none is set, if there is room for it."""
        here = self._settings.update_interval
        return here == interval or (here is None and (interval or 1) <= MEASURED_INTERVAL_LIMIT)

    @abstractmethod
    def can_continue(self, schedule: dict[str, Any]) -> bool:
        """Whether these settings allow the position in a schedule that a checkpoint holds."""

    @property
    def _bound_updates(self) -> list[int]:
        """The update count to show with each partition's state in the arena."""
        return [self.updates - len(partition.collected) for partition in self.partitions]

    @property
    def kernel(self) -> str:
        """What carries out the worker's pass, for people."""
        return self.link.process.ready.kernel

    def device_of(self, index: int) -> torch.device:
        """Where the weights of a partition are."""
        return self._weights(index).device

    def forget_streamed(self) -> None:
        """What has been streamed of the coming step's gradient does not belong to it: all of it is to be sent again."""
        self.link.transfers.finish()  # pieces on their way must not arrive in a slot that is written next
        for partition in self.partitions:
            partition.streamed = Streamed()

    def masters_changed(self) -> None:
        """p, m or v were written from outside (nothing was in flight): begin anew from them, with synchronous steps."""
        self.forget_streamed()
        self.schedule.restart()
        for partition in self.partitions:
            partition.collected.clear()

    def measurements(self) -> dict[str, float]:
        """The last step's figures by name; units are in the names."""
        interval = self.schedule.interval or 1
        return {f"zenflow_{name}": value for name, value in self.figures.as_dict(interval).items()}

    def close(self) -> None:
        """End the worker. Masters and moments stay readable. Idempotent."""
        self.link.close()


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
