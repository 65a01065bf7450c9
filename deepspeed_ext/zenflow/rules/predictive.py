"""Implements the predictive rule: exact steps on the host, and weights that anticipate the update
in flight.

Its schedule is a state machine over plain values.

Overlapped steps: the worker processes a step's gradient while the accelerator runs the next step,
whose weights are predicted. Synchronous steps (during warm-up, while the guard is tripped, or
always if overlap is off): every step waits for its own update.

Example with one warm-up step; ``>`` hands over, ``<`` waits for what was handed over before::

    step        1           2           3
    weights     exact       predicted   predicted
    worker      > <         >           < >

The guard is a circuit breaker, a state machine over the outcomes::

    overlapped    After an error above the allowed one, the next hand-over is probed, too. A second
                  such error in a row makes steps synchronous; a single one, as at a loss spike,
                  does not.
    synchronous   Weights are exact; the guard still predicts its sample. Several small errors in a
                  row make steps overlap again, on trial: an error that arises only from the
                  feedback of predicted weights does not show here. Each time steps become
                  synchronous again, they stay so twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add, itemgetter
from typing import Any

import torch

from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import slots_at
from deepspeed_ext.zenflow.rules.guard import PredictionErrors, Sample, blocks_per_sample, drawn
from deepspeed_ext.zenflow.rules.saved import PartitionValues
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.rule import Partition, Schedule, StepPlan, UpdateRule
from deepspeed_ext.zenflow.transfers.stream import Predict
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask

_WARM_UP_STEPS = 10
"""Synchronous steps at the start, while the moments have seen too few gradients to predict from:
the measured need (docs/results.md)."""


PROBE_EVERY = 20
"""Optimizer steps from one probe to the next."""
STRIKES = 2
"""Number of successive probes above the allowed error after which steps become synchronous."""
CALM_PROBES = 10
"""Number of successive probes with a small error after which steps overlap again, the first
time."""
CALM_EXCESS = 0.75
"""An error is small up to this fraction of the allowed one."""
_MOST_DOUBLINGS = 6


@dataclass(frozen=True)
class GuardState:
    """The state of the guard, the same on every rank.

    Attributes:
        synchronous: whether every step waits for its own update.
        trips: how often steps have become synchronous.
        streak: number of latest successive probes that speak for changing `synchronous`.
        steps_to_probe: optimizer steps until the next hand-over is probed; 0: the coming hand-over
            is.
        probed: whether the newest hand-over is probed and not judged yet.
    """

    synchronous: bool = False
    trips: int = 0
    streak: int = 0
    steps_to_probe: int = 0
    probed: bool = False

    @property
    def is_due(self) -> bool:
        """Whether the next hand-over is probed."""
        return self.steps_to_probe == 0

    def handed_over(self, probed: bool) -> GuardState:
        """The state after a step's gradient was handed over."""
        left = PROBE_EVERY if probed else self.steps_to_probe
        return replace(self, probed=probed, steps_to_probe=max(left - 1, 0))

    def judged(self, excess: float) -> GuardState:
        """The state once the largest `excess` of all ranks and partitions is known; NaN counts as
        too large."""
        speaks_for_change = excess < CALM_EXCESS if self.synchronous else not excess <= 1.0
        streak = self.streak + 1 if speaks_for_change else 0
        needs = CALM_PROBES << min(self.trips - 1, _MOST_DOUBLINGS) if self.synchronous else STRIKES
        if streak >= needs:
            return GuardState(not self.synchronous, self.trips + (not self.synchronous))
        suspicious = streak > 0 and not self.synchronous
        return replace(
            self,
            streak=streak,
            probed=False,
            steps_to_probe=0 if suspicious else self.steps_to_probe,
        )


@dataclass(frozen=True)
class PredictiveState:
    """The position in the schedule; see `Schedule.state`."""

    steps: int = 0
    written: int = 0
    is_ahead: bool = False
    """Whether the worker has published the extrapolated y and the per-block array, which overlapped
    steps need."""
    guard: GuardState = field(default_factory=GuardState)


class PredictiveSchedule(Schedule):
    """See `Schedule`.

    Args:
        overlap: False makes every step synchronous.
        warm_up_steps: synchronous steps at the start, at least one; None: `_WARM_UP_STEPS`.
        guarded: whether the guard judges probes.
        source: where gradients come from.
        wait: what waits for weights that arrive: exact ones, if steps never overlap.
        in_chunks: whether predicted ones arrive, too; otherwise their step writes them.
    """

    def __init__(
        self,
        overlap: bool,
        warm_up_steps: int | None,
        guarded: bool = False,
        source: Source = Source.COPY,
        wait: Wait = Wait.STEP,
        in_chunks: bool = False,
    ) -> None:
        self.state = PredictiveState()
        self.ring = slots_at(source) if overlap else 1
        self._wait, self._in_chunks = wait, in_chunks
        self._overlaps, self._warm_up_steps = overlap, warm_up_steps
        self._guarded = guarded and overlap

    @property
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start; at least one, because the estimate needs second
        moments."""
        return _WARM_UP_STEPS if self._warm_up_steps is None else max(1, self._warm_up_steps)

    def plan(self) -> StepPlan:
        state, guard = self.state, self.state.guard
        overlaps = self._overlaps and not guard.synchronous
        if overlaps and state.is_ahead and state.steps >= self.warm_up_steps:
            wait, probes = self._wait if self._in_chunks else Wait.NEXT_STEP, guard.is_due
            return StepPlan(wait=wait, predicts=True, publish_ahead=True, probes=probes)
        ahead = overlaps and state.steps + 1 >= self.warm_up_steps
        wait = Wait.STEP if self._overlaps else self._wait
        probes = guard.synchronous and guard.is_due
        return StepPlan(wait=wait, publish_ahead=ahead, probes=probes)

    def advance(self, plan: StepPlan) -> None:
        state = self.state
        self.state = replace(
            state,
            steps=state.steps + 1,
            written=state.written + 1,
            is_ahead=plan.publish_ahead,
            guard=state.guard.handed_over(plan.probes),
        )

    @property
    def wants_verdict(self) -> bool:
        """Whether the newest hand-over is probed: then call `judge` before the next one is
        planned."""
        return self._guarded and self.state.guard.probed

    @property
    def is_settled(self) -> bool:
        return not self.wants_verdict

    def judge(self, excess: float) -> bool:
        """Give the guard the probe's result, the same on every rank (`GuardState.judged`), and
        return whether this changes the coming steps."""
        before = self.state.guard
        self.state = replace(self.state, guard=before.judged(excess))
        return self.state.guard.synchronous is not before.synchronous

    def load(self, state: PredictiveState) -> None:
        """As for all schedules. If the guard is now off, steps that it had made synchronous overlap
        again."""
        is_released = state.guard.synchronous and not self._guarded
        super().load(replace(state, guard=GuardState()) if is_released else state)


@dataclass
class PredictionState:
    """State of the rule for one partition of n elements.

    Attributes:
        last: constants of the newest gradient; None before the first.
        known: what the estimate needs of the newest result (`OptimizerKind.known`); None before the
            first.
        sample: taken before the newest hand-over; None if that is not probed or has been measured.
        errors: the result of the newest probe; None once it is judged.
    """

    last: Any = None
    known: torch.Tensor | None = None
    sample: Sample | None = None
    errors: PredictionErrors | None = None


class PredictiveRule(UpdateRule):
    """Computes weights as y minus an estimate of what is in flight.

    Attributes:
        states: state of each partition, in order.
    """

    position, values = PredictiveState, PartitionValues
    schedule: PredictiveSchedule

    def __init__(
        self,
        plan: ZenFlowPlan,
        partitions: Sequence[Partition],
        link: WorkerLink,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> None:
        settings = plan.rule
        self._factor = settings.prediction_error_factor
        schedule = PredictiveSchedule(
            settings.overlapped,
            settings.warm_up_steps,
            guarded=self._factor > 0.0,
            source=plan.source,
            wait=plan.wait,
            in_chunks=plan.predicts_in_chunks,
        )
        super().__init__(plan, schedule, partitions, link, kind)
        self.states = [PredictionState() for _ in partitions]
        self._overlaps, self._ranks = settings.overlapped, ranks
        self._width = settings.per_block_width
        self._figures: dict[str, float] = {}

    # -- one optimizer step ------------------------------------------------------------------------

    def inspect(self) -> None:
        with self._link.deferring_errors():
            self._measure()
        if self.schedule.wants_verdict:
            self._judge()
        for state in self.states:
            state.errors = None

    def step_partition(
        self, plan: StepPlan, partition: Partition, grad: torch.Tensor, step: Any
    ) -> None:
        state = self.states[partition.index]
        if plan.probes:
            most = blocks_per_sample(self.block_size, len(self._partitions))
            blocks = drawn(partition, self.block_size, most, self.schedule.state.steps)
            state.sample = Sample(
                partition, grad, self._kind, self.block_size, state.last, step, blocks
            )
        if plan.predicts:
            self._read_results()  # of all partitions, which go with their `last` so far
        state.last = step
        if not plan.predicts or plan.wait is not Wait.NEXT_STEP:
            return
        for span, y, weights in self._link.stream.parts(partition.index):
            with self._metrics.timing_estimate():
                self._predict(state.known, span, weights, y, grad[slice(*span)], step)
            self._metrics.bytes_up += y.nbytes

    def predict(self, partition: Partition) -> Predict:
        state = self.states[partition.index]
        known, step = state.known, state.last

        def predict(span: Span, y: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor) -> None:
            self._predict(known, span, weights, y, grad, step)

        return predict

    def _predict(
        self,
        known: torch.Tensor | None,
        span: Span,
        weights: torch.Tensor,
        y: torch.Tensor,
        grad: torch.Tensor,
        step: Any,
    ) -> None:
        """Predict the weights of elements of a partition: whole blocks, or up to its end."""
        assert known is not None, "the schedule begins with a synchronous step"
        size, width = self.block_size, self._width
        of_span = known[span.begin // size * width : -(-span.end // size) * width]
        self._kind.predict(of_span, weights, y, grad, step, size)

    def task(self, plan: StepPlan, partition: Partition) -> WorkerTask:
        step = self.states[partition.index].last
        publish = self._kind.ahead(step) if plan.predicts else self._kind.exact(step)
        return WorkerTask(partition.index, self.schedule.coming, publish, step)

    def end_step(self, plan: StepPlan) -> None:
        if plan.publish_ahead and not plan.predicts:
            self._read_results()
            self._publish_again()

    def _publish_again(self) -> None:
        """Make the worker recompute y and the per-block array from p and the moments, for
        overlapped steps."""
        passes = []
        for index, state in enumerate(self.states):
            publish = self._kind.ahead(state.last)
            passes.append(WorkerTask(index, self.schedule.handed_over, publish))
        self._link.depart(passes, gradients=0)

    def _read_results(self) -> None:
        """Keep what estimates need of the newest per-block arrays, once per result."""
        if not self._link.is_unread:
            return
        self._link.is_unread = False
        for partition, state in zip(self._partitions, self.states, strict=True):
            means = self._link.stream.block_means(partition.index)
            # no view of the copy: `offload` could not free what that keeps
            means = means.view(-1).to(partition.device, copy=True, non_blocking=True)
            state.known = self._kind.known(state.last, means)

    # -- the guard ---------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure the errors on the samples, if the newest hand-over is probed and not measured
        yet."""
        if all(state.sample is None for state in self.states):
            return
        for state in self.states:
            if state.sample is not None:  # else an interrupted call has measured it
                state.errors, state.sample = state.sample.errors(), None
        errors = reduce(add, (state.errors for state in self.states if state.errors is not None))
        if errors.update > 0.0:
            relative = map(errors.of_an_update, (errors.prediction, errors.rounding))
            self._figures = dict(zip(("prediction_error", "rounding_error"), relative, strict=True))

    def _judge(self) -> None:
        """Report the largest error of all partitions and ranks to the guard. A collective."""
        worst = 0.0, ""
        with self._link.deferring_errors():
            worst = self._worst()
        excess, told = max(self._ranks.gather_objects(worst), key=itemgetter(0))
        if not self.schedule.judge(excess):
            return
        step, guard = self.schedule.state.steps, self.schedule.state.guard
        if self._ranks.rank == 0 and guard.synchronous:
            logger.warning(
                f"ZenFlow's prediction of the weights is too far off at step {step}: {told}. From "
                "now on every step waits for its own update, until the error has fallen. If this "
                "happens again, use a smaller zenflow.block_size or "
                "learning rate, or turn zenflow.overlap_step off"
            )
        elif self._ranks.rank == 0:
            logger.info(
                "ZenFlow's prediction of the weights is good "
                f"again at step {step}: {told}. Steps overlap"
            )

    def _worst(self) -> tuple[float, str]:
        """The largest excess of this rank's partitions, and the error in words."""
        measured = [
            (state.errors, index)
            for index, state in enumerate(self.states)
            if state.errors is not None
        ]
        if not measured:
            return 0.0, ""
        errors, index = max(measured, key=lambda each: each[0].excess(self._factor))
        where = f"partition {index} of rank {self._ranks.global_rank(self._ranks.rank)}"
        return errors.excess(self._factor), f"{where} {errors.in_words(self._factor)}"

    # -- state -------------------------------------------------------------------------------------

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        state = self.states[partition.index]
        return [] if state.known is None else [state.known]

    def measurements(self) -> dict[str, float]:
        guard = self.schedule.state.guard
        return self._figures | {
            "guard_synchronous": float(guard.synchronous),
            "guard_trips": float(guard.trips),
            "exact": float(not self._overlaps),
        }

    def write_back(self) -> None:
        self._measure()  # before p may be changed

    def resume(self) -> None:
        if self.schedule.plan().predicts:
            self._publish_again()

    def restart(
        self, counts: Sequence[int] | None, partitions: Sequence[Partition] | None = None
    ) -> None:
        super().restart(counts, partitions)
        for state in self.states:
            state.known = state.sample = state.errors = None

    def saved(self) -> list[dict[str, Any]]:
        return [
            {
                "last": None if state.last is None else asdict(state.last),
                "errors": None if state.errors is None else asdict(state.errors),
                "inverse": state.known,
            }
            for state in self.states
        ]

    def restore(self, partitions: Sequence[PartitionValues]) -> None:
        for partition, state, saved in zip(self._partitions, self.states, partitions, strict=True):
            state.last, state.errors = saved.last, saved.errors
            if saved.inverse is not None:
                state.known = saved.inverse.to(partition.device)
