"""The optimizer as the ZeRO subclasses see it: gradients of partitions go in, weights come out.

One optimizer step is `begin_step`, `step_partition` for each partition in order, `finish_weights`, `end_step`. The
subclass of DeepSpeed's optimizer owns parameters and communication; `OffloadedAdam` collects gradients, hands them to
the worker and waits for it; an `UpdateRule` says when, and how weights follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import record_function

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext.zenflow.hyperparameters import AdamHyperparameters
from deepspeed_ext.zenflow.metrics import Metrics
from deepspeed_ext.zenflow.partition import GradFactor, Partition
from deepspeed_ext.zenflow.rule import UpdateRule
from deepspeed_ext.zenflow.schedule import StepPlan
from deepspeed_ext.zenflow.worker.arena import ArrayKey
from deepspeed_ext.zenflow.worker.link import UpdatePhase, WorkerLink
from deepspeed_ext.zenflow.worker.transfers import Streamed

__all__ = ["OffloadedAdam"]


class OffloadedAdam:
    """Adam in a process of its own. Made by `deepspeed_ext.zenflow.start.start_adam`.

    Args:
        rule: the update rule, which knows the same partitions and link.
        partitions: of this rank; p is in place.
        link: to the worker.
        optimizer: holds hyperparameters and, for checkpoints, state; it never moves a weight itself.
        hyperparameters: of `optimizer`.
        ranks: the data-parallel ranks; all of them make one of these, with partitions in the same order.
        metrics: take what is measured here.

    Attributes:
        rule, partitions, link, ranks: as given.
        updates: optimizer steps whose gradient has been taken so far (t of the newest).
    """

    def __init__(
        self,
        rule: UpdateRule[Any],
        partitions: Sequence[Partition],
        link: WorkerLink,
        optimizer: torch.optim.Optimizer,
        hyperparameters: AdamHyperparameters,
        ranks: RankGroup,
        metrics: Metrics,
    ) -> None:
        self.rule = rule
        self.partitions = partitions
        self.link = link
        self.ranks = ranks
        self.updates = 0
        self._optimizer = optimizer
        self._hyperparameters = hyperparameters
        self._metrics = metrics
        self._plan: StepPlan | None = None
        self.bind_state()

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """An optimizer step that will be applied begins; waits for the update in flight if the weights need it. A
        collective.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        with record_function("deepspeed_ext.zenflow.begin_step"):
            with self.link.keeping():
                self._metrics.begin_step()
            if self.link.phase is UpdatePhase.EXPOSED:
                self.link.wait()  # only this rank may have been read or written: no collective
                with self.link.keeping():
                    self.link.phase = UpdatePhase.READ
                    self.rule.resume()
            self._plan = plan = self.rule.schedule.plan()
            if plan.waits_first:
                self.link.receive()

    def step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        """Take the gradient of a partition, on this rank alone.

        Args:
            index: of the partition; all of them, in order, between `begin_step` and `finish_weights`.
            grad: 1-D [n], reduced, neither unscaled nor clipped; may be reused after the call.
            factor: what it is to be multiplied with.
        """
        # Also if the worker has failed: until all ranks wait together, weights that need nothing of it stay right.
        with record_function("deepspeed_ext.zenflow.step_partition"), self.link.keeping():
            plan, partition = self._current_plan, self.partitions[index]
            grad = self._collect(partition, grad, factor.value)
            self.rule.step_partition(plan, partition, grad, factor)
            if plan.waits_last:  # the worker steps this partition while the next gradient is made ready
                self.link.send([self.rule.task(plan, partition)], gradients=plan.handed_over)

    def finish_weights(self) -> None:
        """All gradients have been taken. Afterwards the new weights of all partitions are written. A collective.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        with record_function("deepspeed_ext.zenflow.finish_weights"):
            plan = self._current_plan
            if plan.waits_last:
                self.link.receive()
            self.rule.write_weights(plan)

    def end_step(self) -> None:
        """Hand over what the plan says; does not wait for the worker. A collective only while an interval is open."""
        with record_function("deepspeed_ext.zenflow.end_step"):
            plan, rule = self._current_plan, self.rule
            self._plan = None
            with self.link.keeping():
                if plan.handed_over and not plan.waits_last:
                    tasks = [rule.task(plan, partition) for partition in self.partitions]
                    self.link.send(tasks, gradients=plan.handed_over)
                else:
                    # Weights that were copied from the arena on this stream are read by the next all-gather on
                    # DeepSpeed's own stream, which does not wait for this one. `send` ends with this wait too.
                    self.link.transfers.finish()
                rule.end_step(plan)
            rule.schedule.advance(plan)
            if (interval := rule.measured_interval(plan)) is not None:
                with self.link.keeping():
                    rule.schedule.choose_interval(interval)
                    self.lock_ring()
            self.updates += 1
            with self.link.keeping():
                # No parameter has a gradient, so nothing moves: schedulers and step hooks see the step they wait for.
                self._optimizer.step()
                self._metrics.end_step()

    def changed_blocks(self, index: int) -> Any:
        """Inside a step: the `BlockSet` of a partition whose weights this step changes; None: all may change."""
        return self.rule.changed_blocks(self._current_plan, self.partitions[index])

    # -- gradients ------------------------------------------------------------------------------------------------

    def coming_slot(self, index: int) -> torch.Tensor:
        """The slot of the step's gradient of a partition; 1-D [n], in the arena. Free after `begin_step`."""
        return self.partitions[index].ring[self.rule.schedule.coming]

    def stream_gradient(self, index: int, offset: int, piece: torch.Tensor, wanted: int) -> None:
        """Start copying a part of the coming step's gradient to the host during backward, if the rule takes it so.

        Args:
            index: of the partition.
            offset: where the part begins in it, in elements.
            piece: 1-D, reduced, neither unscaled nor clipped; stays as it is until the step, unless a later piece at
                the same offset replaces it.
            wanted: elements of the partition without its padding.
        """
        streamed, slot = self.partitions[index].streamed, self.coming_slot(index)
        self.link.transfers.to_host(piece.to(slot.dtype), slot[offset : offset + piece.numel()])
        streamed.parts[offset], streamed.wanted = piece.numel(), wanted

    def forget_streamed(self) -> None:
        """What was streamed of the coming step's gradient does not belong to it: all of it is to be sent again."""
        self.link.transfers.finish()  # pieces on their way must not arrive in a slot that is written next
        for partition in self.partitions:
            partition.streamed = Streamed()

    def _collect(self, partition: Partition, grad: torch.Tensor, factor: float) -> torch.Tensor:
        """Copy `grad` to its slot unless it is there; note its constants and return it in the slot's dtype."""
        slot = self.coming_slot(partition.index)
        if grad.dtype != slot.dtype:
            grad = grad.to(slot.dtype)
        if not partition.streamed.is_complete and grad.data_ptr() != slot.data_ptr():
            self.link.transfers.to_host(grad, slot)
            self.link.transfers.wait_for_older()  # else flat gradients pile up while the host runs ahead of the link
        partition.streamed = Streamed()
        self._metrics.bytes_down += slot.nbytes
        partition.collected.append(self._hyperparameters.step(partition.group, self.updates + 1, factor))
        return grad

    @property
    def _current_plan(self) -> StepPlan:
        assert self._plan is not None, "outside of a step"
        return self._plan

    # -- state ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until p, m, v hold every gradient that was handed over. Changes nothing about what follows.

        Raises:
            WorkerError: this rank's worker has failed.
        """
        if (error := self.link.wait()) is not None:
            raise error
        if self.link.phase is not UpdatePhase.EXPOSED:  # else the arena holds what is true
            self.rule.write_back()

    def expose(self) -> bool:
        """p, m, v are about to be read or written from outside: `drain`, and let the next step follow from them.

        If nothing is written, the next step is bitwise unchanged; it costs one extra worker pass.

        Returns:
            False if this rank's worker has failed, which the next step raises on every rank: the caller may be inside
            a collective.
        """
        with self.link.keeping():
            self.drain()
        self.link.phase = UpdatePhase.EXPOSED
        return not self.link.failed

    def bind_state(self) -> None:
        """Let the optimizer's state be the arena's p, m, v, under the masters as parameters."""
        for partition in self.partitions:
            updates = self.updates - (0 if self.rule.shows_collected else len(partition.collected))
            self._optimizer.state[partition.master] = {
                "step": self._hyperparameters.step_value(updates),
                "exp_avg": partition.exp_avg,
                "exp_avg_sq": partition.exp_avg_sq,
            }

    def masters_changed(self, updates: int | None = None) -> None:
        """p, m or v were written from outside (nothing was in flight): begin anew from them, with synchronous steps.

        Args:
            updates: how many updates they have had; None: as many as before.
        """
        self.forget_streamed()
        self.updates = self.updates if updates is None else updates
        self.rule.schedule.restart()
        for partition in self.partitions:
            partition.collected.clear()
        self.rule.restart(updates)

    def lock_ring(self) -> None:
        """Page-lock the slots of the ring in use, which are not known before the interval is."""
        slots = range(min(len(self.partitions[0].ring), self.rule.schedule.ring) if self.partitions else 0)
        self.link.lock([ArrayKey("g", partition.index, slot) for partition in self.partitions for slot in slots])

    def measurements(self) -> dict[str, float]:
        """Metrics of the last step by name; units are in the names."""
        values = self._metrics.as_dict(self.rule.schedule.interval or 1) | self.rule.measurements()
        return {f"zenflow_{name}": value for name, value in values.items()}

    def close(self) -> None:
        """End the worker. Masters and moments stay readable. Idempotent."""
        self.link.close()
