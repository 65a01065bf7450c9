"""Implements the predictive rule: exact Adam on the host, and weights that anticipate the update in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.metrics import Metrics, PredictionProbe
from deepspeed_ext.zenflow.partition import Partition
from deepspeed_ext.zenflow.predictive.estimator import Estimator, drift_coefficient, move_coefficient, publish_ahead
from deepspeed_ext.zenflow.predictive.schedule import PredictivePlan, PredictiveSchedule, WeightSource
from deepspeed_ext.zenflow.predictive.section import PredictivePartitionValues
from deepspeed_ext.zenflow.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.rule import UpdateRule
from deepspeed_ext.zenflow.schedule import MEASURED_INTERVAL_LIMIT, is_overloaded, smallest_interval
from deepspeed_ext.zenflow.worker.link import UpdatePhase, WorkerLink
from deepspeed_ext.zenflow.worker.messages import PartitionPass

__all__ = ["PredictionState", "PredictiveRule"]


@dataclass
class PredictionState:
    """State of the rule for one partition of n elements.

    Attributes:
        publish: how y follows from p, m, v in the newest or coming pass; None before the first step.
        last: constants of the newest gradient that was handed over; None before the first.
        estimator: built from the newest block means; None before the first result.
        drift: D, 1-D [n], dtype of the weights, accelerator; None at interval 1.
    """

    publish: Publish | None = None
    last: AdamStep | None = None
    estimator: Estimator | None = None
    drift: torch.Tensor | None = None


class PredictiveRule(UpdateRule[PredictivePlan]):
    """Computes weights as the published y minus an estimate of what is in flight (see `estimator`).

    Attributes:
        states: state of each partition, in order.
    """

    name = "predictive"
    shows_collected = False
    schedule: PredictiveSchedule

    def __init__(
        self,
        settings: PredictiveSettings,
        partitions: Sequence[Partition],
        link: WorkerLink,
        ranks: RankGroup,
        metrics: Metrics,
    ) -> None:
        schedule = PredictiveSchedule(settings.update_interval, settings.overlapped, settings.warm_up_steps)
        super().__init__(settings.block_size, schedule, partitions, link, metrics)
        self.states = [PredictionState() for _ in partitions]
        self._settings = settings
        self._ranks = ranks
        self._probe = PredictionProbe()

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def step_partition(self, plan: PredictivePlan, partition: Partition, grad: torch.Tensor, grad_scale: float) -> None:
        if plan.source is WeightSource.EXACT:
            return
        if plan.source is WeightSource.PREDICTED:
            self._read_results()
        state, weights = self.states[partition.index], partition.weights()
        step, position = partition.collected[-1], plan.position + 1
        assert state.estimator is not None, "the schedule begins with a synchronous step"
        drift = drift_coefficient(step, position, self._interval)
        if plan.source is WeightSource.DRIFTED:
            if state.drift is None:
                state.drift = torch.zeros_like(weights, device=grad.device)
            move = move_coefficient(step, position, self._interval)
            state.estimator.move(weights, state.drift, grad, grad_scale, move, drift)
            return
        published = self._link.transfers.results(partition.index).published
        state.estimator.predict(weights, published, state.drift, grad, grad_scale, drift)
        self._metrics.bytes_up += published.nbytes
        if state.drift is not None:
            state.drift.zero_()
        if partition.index == 0:
            self._probe.predicted(weights, partition.master)

    def task(self, plan: PredictivePlan, partition: Partition) -> PartitionPass:
        state, steps = self.states[partition.index], tuple(partition.collected)
        partition.collected.clear()
        state.last = last = steps[-1]
        exact = plan.source is WeightSource.EXACT
        state.publish = (
            Publish.exact(last.bias_correction2_sqrt, last.eps) if exact else publish_ahead(last, self._interval)
        )
        return PartitionPass(partition.index, self._slots(len(steps)), steps, state.publish)

    def write_weights(self, plan: PredictivePlan) -> None:
        if plan.source is WeightSource.EXACT:
            with self._link.keeping():
                for partition in self._partitions:
                    self._take_published(partition)

    def end_step(self, plan: PredictivePlan) -> None:
        if plan.source is WeightSource.EXACT and plan.publish_ahead:
            self._read_results()
            for state in self.states:
                assert state.last is not None
                state.publish = publish_ahead(state.last, self._interval)
            self._publish_again()

    def measured_interval(self, plan: PredictivePlan) -> int | None:
        if not self.schedule.wants_interval:
            return None
        worker, device, mine = 0.0, 0.0, 1
        with self._link.keeping():
            worker, device = self._metrics.typical()
            mine = smallest_interval(worker, device, MEASURED_INTERVAL_LIMIT)
        interval = -self._ranks.minimum(-mine)[0]
        if self._ranks.rank == 0:
            logger.info(
                f"zenflow.update_interval = {interval}: the optimizer process takes {worker * 1e3:.1f} ms per pass, "
                f"the accelerator {device * 1e3:.1f} ms per step"
            )
            if is_overloaded(worker, device, interval):
                logger.warning(
                    "even at this interval the optimizer process is slower than the accelerator, so steps will wait: "
                    "give it more cores (lower zenflow.pt_reserved_cores), or do more work per step"
                )
        return interval

    def _publish_again(self) -> None:
        """Let the worker recompute y and the block means from p, m, v, as each partition's `publish` says."""
        passes = []
        for index, state in enumerate(self.states):
            assert state.publish is not None, "publishing again needs a first step"
            passes.append(PartitionPass(index, (), (), state.publish))
        self._link.depart(passes, gradients=0, publishes=self.schedule.plan().waits_first)

    def _read_results(self) -> None:
        """Build the estimators from the newest block means, unless that was done."""
        if self._link.phase is not UpdatePhase.ARRIVED:
            return
        self._link.phase = UpdatePhase.READ
        for partition, state in zip(self._partitions, self.states, strict=True):
            assert state.publish is not None, "a result has arrived, so a pass published it"
            means = self._link.transfers.results(partition.index).block_means
            assert means is not None
            means = means.to(partition.device, copy=True, non_blocking=True)
            state.estimator = Estimator(means, self.block_size, state.publish.bias_correction2_sqrt, state.publish.eps)
        self._probe.arrived(self._partitions[0].master)

    @property
    def _interval(self) -> int:
        interval = self.schedule.interval
        assert interval is not None
        return interval

    # -- state ----------------------------------------------------------------------------------------------------

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        state = self.states[partition.index]
        kept = [state.drift, None if state.estimator is None else state.estimator.inverse]
        return [tensor for tensor in kept if tensor is not None]

    def measurements(self) -> dict[str, float]:
        return self._probe.errors()

    def resume(self) -> None:
        if self.schedule.plan().source is not WeightSource.EXACT:
            self._publish_again()

    def restart(self, updates: int | None) -> None:
        for state in self.states:
            state.estimator = None
            if state.drift is not None:
                state.drift.zero_()

    def saved(self) -> list[dict[str, Any]]:
        return [
            {
                "publish": None if state.publish is None else asdict(state.publish),
                "drift": None if state.drift is None else state.drift.cpu().clone(),
                "inverse": None if state.estimator is None else state.estimator.inverse.cpu().clone(),
            }
            for state in self.states
        ]

    def changed_setting(self, schedule: Mapping[str, Any], position: int) -> str | None:
        there, here = schedule["interval"], self._settings.update_interval
        if self._settings.overlapped and not self._interval_fits(here, there):
            return f"zenflow.update_interval ({there} in the checkpoint)"
        return None if self._settings.overlapped or not position else "zenflow.overlap_step"

    def restore(self, partitions: Sequence[PredictivePartitionValues]) -> None:
        for partition, state, saved in zip(self._partitions, self.states, partitions, strict=True):
            state.publish = None if saved.publish is None else saved.publish.make()
            state.drift = None if saved.drift is None else saved.drift.to(partition.device)
            if saved.inverse is not None:
                state.estimator = Estimator.remembering(saved.inverse.to(partition.device), self.block_size)
