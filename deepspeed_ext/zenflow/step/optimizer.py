"""Runs optimizer steps for the ZeRO subclasses: takes the gradients of partitions and writes their
weights.

One optimizer step is `begin_step`, `step_partition` for each partition in order, `finish_weights`,
`end_step`. The ZeRO subclass owns parameters and communication. `HostOptimizer` collects gradients,
hands them to the worker and waits for it. An `UpdateRule` decides when, and computes the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from deepspeed_ext.runtime.memory import Parked
from deepspeed_ext.runtime.profiling import in_profile
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.link import UpdatePhase, WorkerLink
from deepspeed_ext.zenflow.step.optimizer_state import OptimizerState
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.schedule import StepPlan
from deepspeed_ext.zenflow.step.shown_state import ShownState, write
from deepspeed_ext.zenflow.worker.kernel.passes import StepConstants
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask

__all__ = ["Mover", "HostOptimizer"]


class Mover(Protocol):
    """Moves a run to a better plan. Every rank of the model has one, or none.

    Attributes:
        device_seconds: accelerator time between two steps when the plan was chosen; 0: not chosen
            yet.
    """

    device_seconds: float

    @property
    def is_apart(self) -> bool:
        """Whether steps that overlap wait for their pass before they end, so that forward and
        backward run alone."""

    def after_step(self, host: HostOptimizer, plan: StepPlan) -> None:
        """Observe a step that has ended. A collective if a choice is due."""

    def measured(self) -> dict[str, Any] | None:
        """What was measured for a choice that is still to come, as plain values, so that a resumed
        run makes it at the same step; None: there is none."""

    def adopt(self, host: HostOptimizer, heads: Sequence[int]) -> None:
        """Take over a checkpoint's share if there is room for it, after p and the moments were
        loaded. A collective.

        Args:
            heads: elements of each partition that step on the accelerator.
        """

    def resumed(
        self,
        host: HostOptimizer,
        threads: int | None,
        device_seconds: float,
        *,
        is_elsewhere: bool,
        measured: Mapping[str, Any] | None,
    ) -> None:
        """Continue with a checkpoint's plan, or with its measurements. A collective.

        Args:
            threads: threads of the optimizer process; None: not known.
            device_seconds: see `Mover`.
            is_elsewhere: whether it was saved on another machine, so that steps are measured again.
            measured: see `measured`.
        """


class HostOptimizer:
    """The user's optimizer, Adam or Lion, in a separate process. Built by
    `deepspeed_ext.zenflow.start.start_optimizer`.

    Args:
        decided: the plan that everything was built from.
        rule: the update rule, built on the same partitions and link.
        state: this rank's partitions, with p in place.
        kind: the user's optimizer as ZenFlow runs it.
        ranks: the ranks that the model is spread over; each builds one of these.

    Attributes:
        decided, rule, link, kind, ranks: the arguments.
        partitions, states, share, coded: see `OptimizerState`; `states` are its `wholes`.
        counts: for each partition, the updates of p and the moments whose gradients have been taken
            so far (t of the newest). They differ only if a user has reset some partitions' state.
        shown: the optimizer's state as users reach it.
        plan: plan of the current step; None between steps. Kept if an exception interrupts the
            step.
        is_offloaded: whether `offload` was called, and `reload` was not.
        mover: may move the run to a better plan; None: the plan stays.
    """

    def __init__(
        self,
        decided: ZenFlowPlan,
        rule: UpdateRule[Any],
        state: OptimizerState,
        link: WorkerLink,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> None:
        self.decided = decided
        self.rule = rule
        self.link = link
        self._hold(state)
        self.kind = kind
        self.ranks = ranks
        self.counts = [0] * len(self.partitions)
        self._metrics = link.metrics
        self.plan: StepPlan | None = None
        self.is_offloaded = False
        self._changes = 0
        self.mover: Mover | None = None
        self._parked: Parked | None = None
        used = weakref.WeakMethod(self._used)

        def use() -> None:
            if (noted := used()) is not None:
                noted()

        self.shown = ShownState(kind.optimizer, self.states, kind.step_value, use)
        self._bind_state()

    def _hold(self, state: OptimizerState) -> None:
        self._state = state
        self.partitions, self.states = state.partitions, state.wholes
        self.share, self.coded = state.share, state.coded
        self.link.arrivals.partitions = state.partitions

    @property
    def version(self) -> int:
        """Changes whenever p does, by a step, a load or a user's write."""
        return self._changes + self.shown.writes

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
            with self.link.deferring_errors():
                self._take_over()
            self._changes += 1
            self.plan = self.rule.schedule.plan()  # from here on, an interrupted step is noticed
            with self.link.deferring_errors():
                self._metrics.begin_step()
            if self.link.phase is UpdatePhase.EXPOSED:
                self.link.wait()  # no collective, because other ranks may not be exposed
                with self.link.deferring_errors():
                    self.link.phase = UpdatePhase.READ
                    self._state.take()
                    self.rule.resume()
            if self.coded is not None:
                self.coded.is_shown = False
            if self.rule.schedule.plan().waits_first:
                self._receive()
                self.rule.arrived()
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
            partition = self.partitions[index]
            transfers = self.link.transfers
            slot = self.coming_slot(index) if transfers.handed_over is Place.HOST else None
            step = self.kind.step(partition.group, self.counts[index] + 1, grad_scale)
            if self.share is not None:
                grad = self._step_share(self.share, index, grad, step)
            if grad.dtype != partition.grad_dtype:
                grad = grad.to(partition.grad_dtype)
            partition.collected.append(step)
            handed_over = self.rule.to_hand_over(plan, partition, grad)
            ready = transfers.ready()
            self.rule.step_partition(plan, partition, grad)
            if handed_over is not None:
                transfers.take(index, handed_over, slot, ready)
                self._metrics.bytes_down += handed_over.nbytes
            # the worker steps this partition while the next gradient is prepared
            if plan.waits_last and not self.decided.peeks:
                task = self.rule.task(plan, partition)
                arriving = [index] if plan.weights_arrive else ()
                self.link.depart(
                    [task], gradients=plan.handed_over, publishes=True, arriving=arriving
                )

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
            if plan.waits_last and self.decided.peeks:
                # Not before: DeepSpeed reads a partition's weights after its `step_partition`, on
                # the current stream, and these come up on another.
                self._depart(plan, self._tasks(plan), publishes=True)
                self.link.receive(passes=False)
            elif plan.waits_last:
                self._receive()
            self.rule.write_weights(plan)
            if starts_copies and not plan.waits_last:
                # overlaps with DeepSpeed's use of the weights, which may wait for the device
                self.link.start_copies()
            with self.link.deferring_errors():
                self._metrics.gathering.start()

    def end_step(self) -> None:
        """Hand over what the plan says, without waiting for the worker, except while the mover
        measures. A collective only until the share is chosen."""
        with in_profile("zenflow.end_step"):
            plan, rule = self._current_plan, self.rule
            with self.link.deferring_errors():
                self._metrics.gathering.stop()
            tasks = [] if plan.waits_last else self._tasks(plan)
            rule.schedule.advance(plan)
            with self.link.deferring_errors():
                if not plan.waits_last:
                    self._depart(plan, tasks, publishes=rule.schedule.plan().waits_first)
                self.link.follow()
                rule.end_step(plan)
            self.counts = [count + 1 for count in self.counts]
            if is_apart := self.mover is not None and self.mover.is_apart:
                with self.link.deferring_errors(), self._metrics.waiting.measured():
                    self.link.wait()
            with self.link.deferring_errors():
                self._metrics.note_link(self.link.transfers.copying_seconds())
                self._metrics.end_step(plan.waits_last or is_apart)
                self.shown.advance(self._shown_counts())
            self.plan = None
            with self.link.deferring_errors():
                # No parameter has a gradient, so no weight changes; schedulers and step hooks still
                # see a step.
                self.kind.optimizer.step()
            if self.mover is not None:
                self.mover.after_step(self, plan)

    def _tasks(self, plan: StepPlan) -> list[WorkerTask]:
        """What the step hands over, of all partitions."""
        with self.link.deferring_errors():
            if plan.handed_over:
                return [self.rule.task(plan, partition) for partition in self.partitions]
        return []

    def _depart(self, plan: StepPlan, tasks: list[WorkerTask], *, publishes: bool) -> None:
        arriving = range(len(self.partitions)) if plan.weights_arrive else ()
        self.link.depart(tasks, gradients=plan.handed_over, publishes=publishes, arriving=arriving)

    def _receive(self) -> None:
        """Wait for the worker on all ranks; then no save reads the arena any more."""
        self.link.receive()
        with self.link.deferring_errors():
            self._state.hide()

    # -- gradients ---------------------------------------------------------------------------------

    def coming_slot(self, index: int, span: Span | None = None) -> torch.Tensor:
        """The slot for the rule's part of a partition's gradient in the coming step; 1-D, in the
        arena. Not for gradients that pass through in chunks. It is free after `begin_step`, but on
        an accelerator other than the CPU the step may still read y there. Waits until the worker
        has read the last gradient of `span`, of everything by default."""
        self.link.free(index, span or Span(0, self.partitions[index].master.numel()))
        return self.partitions[index].ring[self.rule.schedule.coming]

    @property
    def _current_plan(self) -> StepPlan:
        assert self.plan is not None, "valid only inside a step"
        return self.plan

    # -- weights -----------------------------------------------------------------------------------

    def complete_weights(
        self, parts: Iterable[tuple[int, Span]] | None = None, *, first: bool = False
    ) -> None:
        """Complete the last step's weights that are used now, on this rank alone. Waits only if
        weights arrive in forward (`ZenFlowPlan.weights_arrive`).

        Args:
            parts: ZeRO's partitions, and spans of their elements; None: everything.
            first: whether these parts come before all others from the coming step on.
        """
        used = None if parts is None else self._on_host(parts)
        if first and used:
            self.link.arrivals.put_first(used)
        self.link.complete(used)

    def _on_host(self, parts: Iterable[tuple[int, Span]]) -> list[tuple[int, Span]]:
        heads = [0] * len(self.partitions) if self.share is None else self.share.numels
        return [
            (index, Span(max(0, span.begin - heads[index]), span.end - heads[index]))
            for index, span in parts
            if span.end > heads[index]
        ]

    # -- state -------------------------------------------------------------------------------------

    def drain(self, *, shows_moments: bool = True, takes_over: bool = True) -> None:
        """Wait until p, m, v and their step count include every gradient that was handed over.
        Later steps are bitwise unaffected.

        Args:
            shows_moments: whether to show coded moments in fp32; otherwise whatever writes them to
                a file decodes them (see `CodedMoments`).
            takes_over: whether to take over what a user has changed; otherwise the next step does.

        Raises:
            WorkerError: this rank's worker has failed.
        """
        self._settle(shows_moments)
        if takes_over:
            self._take_over()

    def _settle(self, shows_moments: bool) -> None:
        """`drain`, without taking over what a user has changed."""
        if (error := self.link.wait()) is not None:
            raise error
        # otherwise the arena already holds everything, except perhaps decoded moments
        if self.link.phase is not UpdatePhase.EXPOSED:
            self.rule.write_back()
            self._state.show()
        if shows_moments:
            self._state.show_moments()

    def _take_over(self) -> None:
        """Take over what a user has changed, other than by writing in place, so that the next step
        starts from it.

        Raises:
            StateError: a change has no exact meaning.
            WorkerError: this rank's worker has failed.
        """
        if changes := self.shown.changes():
            self._changes += 1
            self._settle(shows_moments=True)
            write(changes)
            for change in changes:
                if change.updates is not None:
                    self._recount(self.partitions[change.partition], change.updates)
            self.link.phase = UpdatePhase.EXPOSED
            self._bind_state()

    def _recount(self, partition: Partition, updates: int) -> None:
        """Continue to count from `updates`; gradients that are collected follow."""
        if not self.rule.shows_collected:
            number = updates + 1
            partition.collected = [
                replace(step, step=number + k) for k, step in enumerate(partition.collected)
            ]
            updates += len(partition.collected)
        self.counts[partition.index] = updates
        self.rule.recounted(partition, updates)

    def _used(self) -> None:
        """Called before a user's access to values of p or a moment."""
        if self.plan is None and not self._expose():
            error = self.link.wait()
            assert error is not None
            raise error

    def expose(self, *, shows_moments: bool = True) -> bool:
        """Prepare p, m, v for reading or writing from outside: drain, and make the next step start
        from their new values.

        If nothing is written, the next step is bitwise unchanged; it costs one extra worker pass.

        Args:
            shows_moments: see `drain`.

        Returns:
            False if this rank's worker has failed. The error is raised on every rank by the next
            step, because the caller may be inside a collective.
        """
        if exposed := self._expose(shows_moments=shows_moments):
            self._take_over()
        return exposed

    def _expose(self, *, shows_moments: bool = True) -> bool:
        """`expose`, without taking over what a user has changed."""
        with self.link.deferring_errors():
            self._settle(shows_moments)
        self.link.phase = UpdatePhase.EXPOSED
        return not self.link.failed

    def offload(self, *, pins: bool = True) -> None:
        """Wait for the update in flight, and free the accelerator memory that is held between
        steps. Call `reload` before the next step. Idempotent. Frees nothing if the host has no
        memory for it.

        Args:
            pins: whether the copies on the host are page-locked, if possible.

        If this rank's worker has failed, nothing is freed, and the next step raises the error on
        every rank."""
        self.link.wait()
        if self._parked is None and not self.link.failed:
            beside = [
                tensor
                for partition in self.partitions
                for tensor in self._beside_weights(partition)
            ]
            assert all(tensor._base is None for tensor in beside), "a base would keep its memory"
            self._parked = Parked(beside, pins=pins)
            with self.link.deferring_errors():
                self.link.transfers.release()
        self.is_offloaded = True

    def reload(self) -> None:
        """Undo `offload`; later steps are bitwise unaffected. Idempotent, even after it ran out of
        memory."""
        if self._parked is not None:
            self._parked.restore()
            if not self.link.transfers.restore():
                self._expose(shows_moments=False)  # so that the next step publishes again
            self._parked = None
        self.is_offloaded = False

    def _beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        beside = self._state.on_accelerator(partition.index)
        return [*self.rule.state_beside_weights(partition), *beside]

    def _bind_state(self) -> None:
        self.shown.bind(self._shown_counts())

    def _shown_counts(self) -> list[int]:
        """For each partition, the updates of p and the moments that are shown."""
        if self.rule.shows_collected:
            return list(self.counts)
        return [
            count - len(each.collected)
            for count, each in zip(self.counts, self.partitions, strict=True)
        ]

    @property
    def updates(self) -> int:
        """Updates of the partition that has had the most."""
        return max(self.counts, default=0)

    def masters_changed(self, counts: Sequence[int] | None = None) -> None:
        """Start over with synchronous steps from p, m, v, which were written from outside. Nothing
        may be in flight.

        Args:
            counts: for each partition, number of updates that the new values have had; None: as
                many as the old ones.
        """
        self._changes += 1
        self.counts = self.counts if counts is None else list(counts)
        self.rule.schedule.restart()
        for partition in self.partitions:
            partition.collected.clear()
        self.rule.restart(None if counts is None else self.counts)
        self._state.take()
        self._bind_state()

    # -- the share on the accelerator --------------------------------------------------------------

    def _step_share(
        self, share: AcceleratorShare, index: int, grad: torch.Tensor, step: StepConstants
    ) -> torch.Tensor:
        """Step the share of a partition, and return the rest of its gradient."""
        numel = share.numels[index]
        share.step(index, grad[:numel], step, self.states[index].weights()[:numel])
        return grad[numel:]

    def measurements(self) -> dict[str, float]:
        """The metrics of the last step that have been measured, by name; units are in the names."""
        values = self._metrics.as_dict() | self.rule.measurements()
        return {f"zenflow_{name}": value for name, value in values.items()}

    def move_to(
        self, plan: ZenFlowPlan, partitions: Sequence[Partition], share: AcceleratorShare
    ) -> None:
        """Continue with `plan`, in which more elements step on the accelerator. Call it only when p
        and the moments are complete on the host, and y and the per-block arrays of the last update
        are not read again.

        Args:
            partitions: the partitions as the rule now sees them.
            share: holds p and the moments of the rest.
        """
        self.decided = plan
        self._hold(replace(self._state, partitions=partitions, share=share))
        self.rule.restart(None, partitions)
        self._lock_slots()

    def _lock_slots(self) -> None:
        """Page-lock the slots of gradients that are whole on the host. Nothing may be in flight."""
        if self.decided.places.handed_over is Place.HOST:
            self.link.transfers.keep_whole()
            keys = (self.link.arena.keys("g", each.index) for each in self.partitions)
            self.link.lock([key for of_partition in keys for key in of_partition])

    def close(self) -> None:
        """Stop the worker. Weights, masters and moments stay readable. Idempotent."""
        if self.link.home.is_here:
            self.link.complete()
        self.shown.close()
        self.link.close()
