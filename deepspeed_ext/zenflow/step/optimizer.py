"""Runs optimizer steps for the ZeRO subclasses: takes the gradients of partitions and writes their
weights.

One optimizer step is `begin_step`, `step_partition` for each partition in order, `finish_weights`,
`end_step`. The ZeRO subclass owns parameters and communication. `HostOptimizer` collects gradients,
hands them to the worker and waits for it. An `UpdateRule` decides when, and computes the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepspeed_ext.runtime.memory import Parked
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.runtime.timing import in_profile
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.rule import Partition, StepPlan, UpdateRule
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.transfers.stream import Predict
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask


class HostOptimizer:
    """The user's optimizer, Adam or Lion, in a separate process. Built by
    `deepspeed_ext.zenflow.start.start_optimizer`.

    Args:
        decided: the plan that everything was built from.
        rule: the update rule, built on the same partitions and link.
        state: p, the moments and the step counts of this rank's partitions.
        kind: the user's optimizer as ZenFlow runs it.
        ranks: the ranks that the model is spread over; each builds one of these.

    Attributes:
        decided, rule, state, link, kind, ranks: the arguments.
        plan: plan of the current step; None between steps. Kept if an exception interrupts the
            step.
        is_offloaded: whether `offload` was called, and `reload` was not.
        first_steps: `FirstSteps`, which may choose a better plan; None: the plan stays.
    """

    def __init__(
        self,
        decided: ZenFlowPlan,
        rule: UpdateRule,
        state: StateStore,
        link: WorkerLink,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> None:
        self.decided = decided
        self.rule = rule
        self.link = link
        self.state = state
        self.kind = kind
        self.ranks = ranks
        self._metrics = link.metrics
        self.plan: StepPlan | None = None
        self.is_offloaded = False
        self.first_steps: Any = None
        self._parked: Parked | None = None
        self._is_handed_over = False
        link.stream.weights = [each.weights for each in state.partitions]

    # -- one optimizer step ------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin an optimizer step that will be applied; wait for the update in flight if the
        weights need it. A collective.

        Raises:
            WorkerError: on every rank, if any rank's worker has failed; or the error with which the
                last step ended.
        """
        with in_profile("zenflow.begin_step"):
            if self.plan is not None:  # the last step failed
                self.link.raise_deferred()
            self.state.begin_step()
            self._is_handed_over = False
            self.plan = self.rule.schedule.plan()  # from here on, an interrupted step is noticed
            with self.link.deferring_errors():
                self._metrics.begin_step()
            self.state.take_back()
            if self.rule.schedule.plan().waits_first:
                self._receive()
                self.rule.inspect()
            self.plan = self.rule.schedule.plan()

    def step_partition(self, index: int, grad: torch.Tensor, grad_scale: float) -> None:
        """Take the gradient of one partition, on this rank alone.

        Args:
            index: number of the partition; each is taken once, in order, between `begin_step` and
                `finish_weights`.
            grad: 1-D [n], of the whole partition, reduced, neither unscaled nor clipped; may be
                reused after the call.
            grad_scale: c, the multiplier of the gradient (loss scale and clipping).
        """
        # Runs even if the worker has failed: weights that do not depend on it stay correct until
        # all ranks wait.
        with in_profile("zenflow.step_partition"), self.link.deferring_errors():
            plan = self._current_plan
            partition = self.state.partitions[index]
            stream = self.link.stream
            whole = not self.decided.is_in_transit
            slot = self.coming_slot(index) if whole else None
            step = self.kind.step(partition.group, self.state.counts[index] + 1, grad_scale)
            if (heads := self.state.heads) is not None:
                numel = heads.numels[index]
                weights = self.state.wholes[index].weights()
                heads.step(index, grad[:numel], step, weights[:numel])
                grad = grad[numel:]
            if grad.dtype != partition.grad_dtype:
                grad = grad.to(partition.grad_dtype)
            handed_over = self.rule.to_hand_over(plan, partition, grad, step)
            ready = stream.ready()
            self.rule.step_partition(plan, partition, grad, step)
            if handed_over is not None:
                stream.take(index, handed_over, slot, ready)
                self._metrics.bytes_down += handed_over.nbytes

    def finish_weights(self, *, starts_copies: bool = True) -> None:
        """Write the new weights of all partitions, once all gradients have been taken. A
        collective.

        Args:
            starts_copies: whether copies of gradients start now, beside what the caller does with
                the weights. False if that waits for the whole device, and so for the copies, which
                then start in `end_step`.

        Raises:
            WorkerError: on every rank, if any rank's worker has failed.
        """
        with in_profile("zenflow.finish_weights"):
            plan = self._current_plan
            if plan.wait is Wait.STEP:
                # Not before: DeepSpeed reads a partition's weights after its `step_partition`, on
                # the current stream, and these come up on another.
                self._hand_over(plan)
                self._receive(passes=plan.waits_last and not self.decided.peeks)
            self.rule.write_weights(plan)
            if plan.wait is Wait.NEXT_STEP and starts_copies:
                # overlaps with DeepSpeed's use of the weights, which may wait for the device
                self._hand_over(plan)
            with self.link.deferring_errors():
                self._metrics.gathering.start()

    def end_step(self) -> None:
        """Hand over what the plan says, without waiting for the worker. A collective only where
        the first steps choose a plan."""
        with in_profile("zenflow.end_step"):
            plan, rule = self._current_plan, self.rule
            with self.link.deferring_errors():
                self._metrics.gathering.stop()
            self._hand_over(plan)
            rule.schedule.advance(plan)
            with self.link.deferring_errors():
                rule.end_step(plan)
            with self.link.deferring_errors():
                self._metrics.note_link(self.link.stream.copying_seconds())
                self._metrics.end_step(plan.waits_last)
            with self.link.deferring_errors():
                self.state.end_step()
            self.plan = None
            with self.link.deferring_errors():
                # No parameter has a gradient, so no weight changes; schedulers and step hooks still
                # see a step.
                self.kind.optimizer.step()
            if self.first_steps is not None:
                self.first_steps.after_step(self, plan)

    def _hand_over(self, plan: StepPlan) -> None:
        """Hand over the gradients of all partitions, once per step."""
        if self._is_handed_over:
            return
        self._is_handed_over, tasks, predicts = True, list[WorkerTask](), dict[int, Predict]()
        gives = () if plan.wait is Wait.NEXT_STEP else range(len(self.state.counts))
        if plan.handed_over:
            with self.link.deferring_errors():
                partitions = self.state.partitions
                if plan.predicts and gives:
                    predicts = {each.index: self.rule.predict(each) for each in partitions}
                tasks = [self.rule.task(plan, each) for each in partitions]
        self.link.depart(tasks, gradients=plan.handed_over, gives=gives, predicts=predicts)

    def _receive(self, *, passes: bool = True) -> None:
        """Wait for the worker on all ranks; then no save reads the arena any more. Without `passes`
        for this step's weights alone."""
        if passes:
            with self.link.deferring_errors(), self._metrics.waiting.measured():
                self.link.wait()
        else:
            self.link.complete()
        self.link.raise_deferred()
        if passes:
            with self.link.deferring_errors():
                self.state.hide()

    # -- gradients ---------------------------------------------------------------------------------

    def coming_slot(self, index: int, span: Span | None = None) -> torch.Tensor:
        """The slot for the rule's part of a partition's gradient in the coming step; 1-D, in the
        arena. Not for gradients that pass through in chunks. It is free after `begin_step`, but on
        an accelerator other than the CPU the step may still read y there. Waits until the worker
        has read the last gradient of `span`, of everything by default."""
        partition = self.state.partitions[index]
        self.link.free(index, span or Span(0, partition.master.numel()))
        return partition.ring[self.rule.schedule.coming]

    @property
    def _current_plan(self) -> StepPlan:
        assert self.plan is not None, "valid only inside a step"
        return self.plan

    # -- weights -----------------------------------------------------------------------------------

    def complete_weights(
        self, parts: Iterable[tuple[int, Span]] | None = None, *, first: bool = False
    ) -> None:
        """Complete the last step's weights that are used now, on this rank alone. Waits only if
        weights arrive in forward (`ZenFlowPlan.wait`).

        Args:
            parts: ZeRO's partitions, and spans of their elements; None: everything.
            first: whether these parts come before all others from the coming step on.
        """
        heads, used = self.state.heads, None
        if parts is not None:  # those that the rule steps, counted from its first
            before = [0] * len(self.state.wholes) if heads is None else heads.numels
            used = [
                (index, Span(max(0, span.begin - before[index]), span.end - before[index]))
                for index, span in parts
                if span.end > before[index]
            ]
        if first and used:
            self.link.stream.chunks.put_first(used)
        self.link.complete(used)

    # -- states on the host ------------------------------------------------------------------------

    def offload(self, *, pins: bool) -> None:
        """Wait for the update in flight, and free the accelerator memory that is held between
        steps. Call `reload` before the next step. Idempotent. Frees nothing if the host has no
        memory for it.

        Args:
            pins: whether the copies on the host are page-locked, if possible.

        If this rank's worker has failed, nothing is freed, and the next step raises the error on
        every rank."""
        self.link.wait()
        if self._parked is None and not self.link.failed:
            heads, beside = self.state.heads, list[torch.Tensor]()
            for partition in self.state.partitions:
                beside += self.rule.state_beside_weights(partition)
                beside += () if heads is None else heads.tensors(partition.index)
            assert all(tensor._base is None for tensor in beside), "a base would keep its memory"
            self._parked = Parked(beside, pins=pins)
            with self.link.deferring_errors():
                self.link.stream.release()
        self.is_offloaded = True

    def reload(self) -> None:
        """Undo `offload`; later steps are bitwise unaffected. Idempotent, even after it ran out of
        memory."""
        if self._parked is not None:
            self._parked.restore()
            if not self.link.stream.restore():
                # so that the next step publishes again
                self.state.expose(shows_moments=False, takes_over=False)
            self._parked = None
        self.is_offloaded = False

    # -- the share on the accelerator --------------------------------------------------------------

    def measurements(self) -> dict[str, float]:
        """The metrics of the last step that have been measured, by name; units are in the names."""
        values = self._metrics.as_dict() | self.rule.measurements()
        return {f"zenflow_{name}": value for name, value in values.items()}

    def move_to(self, plan: ZenFlowPlan, partitions: Sequence[Partition], heads: Heads) -> None:
        """Continue with `plan`, in which more elements step on the accelerator. Call it only when p
        and the moments are complete on the host, and y and the per-block arrays of the last update
        are not read again.

        Args:
            partitions: the partitions as the rule now sees them.
            heads: hold p and the moments of the rest.
        """
        self.decided = plan
        self.state.partitions = partitions
        self.link.stream.weights = [each.weights for each in partitions]
        self.state.heads = heads
        self.rule.restart(None, partitions)

    def close(self) -> None:
        """Stop the worker, and free p and the moments; weights stay readable. Idempotent."""
        if self.link.home.is_here and not sys.is_finalizing():  # which frees the weights, too
            self.link.complete()
        self.state.is_open = False
        self.link.close()
