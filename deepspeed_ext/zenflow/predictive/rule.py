"""The predictive rule: exact Adam on the host for every step, and weights that foresee the update still in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.checkpoint_section import PredictedPartitionValues
from deepspeed_ext.zenflow.kernel import Publish
from deepspeed_ext.zenflow.metrics import PredictionProbe
from deepspeed_ext.zenflow.optimizer import MEASURED_INTERVAL_LIMIT, OffloadedAdam
from deepspeed_ext.zenflow.partition import GradFactor, PartitionState
from deepspeed_ext.zenflow.predictive.estimator import Estimator, drift_coefficient, move_coefficient, publish_ahead
from deepspeed_ext.zenflow.predictive.schedule import PredictiveSchedule, StepPlan, WeightRule, ring_of
from deepspeed_ext.zenflow.schedule import is_overloaded, smallest_interval
from deepspeed_ext.zenflow.worker.messages import PartitionPass

__all__ = ["PredictedPartition", "PredictiveAdam"]


@dataclass
class PredictedPartition(PartitionState):
    """What the trainer holds of one partition of n elements.

    Attributes:
        block_means: means of v over blocks, in the arena.
        publish: how y follows or will follow from p, m, v.
        estimator: made from the newest block means; None before the first result.
        drift: D, 16 bit, accelerator; None at interval 1.
    """

    block_means: torch.Tensor
    publish: Publish
    estimator: Estimator | None = None
    drift: torch.Tensor | None = None


class PredictiveAdam(OffloadedAdam[PredictedPartition]):
    """`OffloadedAdam` whose weights are what the worker sent plus an estimate of what is in flight (see `predict`).

    Attributes:
        last_clip: clip factor of the newest step.
    """

    rule = "predictive"
    per_block = ("block_means", "float32")
    schedule: PredictiveSchedule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs["settings"]
        early = settings.predict_clip == "previous"
        self.schedule = PredictiveSchedule(settings.update_interval, settings.overlapped, settings.warm_up_steps, early)
        self.last_clip: float | None = None
        self._clip: float | None = None
        self._plan: StepPlan | None = None
        self._unread = False
        self._probe = PredictionProbe()
        super().__init__(*args, **kwargs)

    @property
    def block_size(self) -> int:
        return self._settings.block_size

    @property
    def _room(self) -> int:
        longest = self._settings.update_interval or MEASURED_INTERVAL_LIMIT
        return ring_of(longest, self._settings.predict_clip == "previous") if self._settings.overlapped else 1

    def _partition(self, index: int, group: int) -> PredictedPartition:
        p, m, v, y, means = (self._array(kind, index) for kind in ("p", "m", "v", "y", "block_means"))
        exact = Publish.exact(1.0, float(self._optimizer.param_groups[group]["eps"]))
        return PredictedPartition(
            group, p.requires_grad_(), m, v, y, self._ring(index), block_means=means, publish=exact
        )

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        self._plan = self.schedule.plan()
        if self._plan.waits_first:
            self.link.receive()
        if self._plan.rule is WeightRule.PREDICTED:
            with self.link.keeping():
                self._read_results()

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients are wanted while backward is still running: the estimate asks nothing of the whole."""
        return self._settings.predict_clip == "previous"

    def stream_gradient(self, index: int, offset: int, piece: torch.Tensor, wanted: int) -> None:
        """Start copying a part of the coming step's gradient to the host, from within backward.

        Args:
            index: of the partition.
            offset: where the part begins in it, in elements.
            piece: 1-D, reduced, neither unscaled nor clipped; stays as it is until the step, unless a later piece at
                the same place replaces it.
            wanted: elements of the partition without its padding.
        """
        streamed, slot = self.partitions[index].streamed, self.coming_slot(index)
        self.link.transfers.to_host(piece.to(slot.dtype), slot[offset : offset + piece.numel()])
        streamed.parts[offset], streamed.wanted = piece.numel(), wanted

    def _step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        plan = self._plan
        assert plan is not None, "step_partition outside of a step"
        grad = self._collect(index, grad, factor.value)
        if plan.rule is WeightRule.EXACT:
            self._step_exactly(index)  # the worker steps this partition while the next gradient is made ready
        else:
            previous = self._settings.predict_clip == "previous" and self.last_clip is not None
            scale = factor.unscale * (self.last_clip or 1.0) if previous else factor.value
            self._estimate(index, plan, grad, scale)
        self._clip = factor.clip

    def _step_exactly(self, index: int) -> None:
        last = self.partitions[index].collected[-1]
        self._submit([index], Publish.exact(last.bias_correction2_sqrt, last.eps))

    def _finish_partitions(self) -> None:
        assert self._plan is not None
        if self._plan.rule is WeightRule.EXACT:
            self.link.receive()
            with self.link.keeping():
                for index in range(len(self.partitions)):
                    self._take_published(index)

    def _estimate(self, index: int, plan: StepPlan, grad: torch.Tensor, scale: float) -> None:
        partition, weights = self.partitions[index], self._weights(index)
        step, interval, position = partition.collected[-1], self._interval, plan.position + 1
        assert partition.estimator is not None, "the schedule begins with a synchronous step"
        drift = drift_coefficient(step, position, interval)
        if plan.rule is WeightRule.DRIFTED:
            if partition.drift is None:
                partition.drift = torch.zeros_like(weights, device=grad.device)
            move = move_coefficient(step, position, interval)
            partition.estimator.move(weights, partition.drift, grad, scale, move, drift)
            return
        partition.estimator.predict(weights, partition.published, partition.drift, grad, scale, drift)
        self.figures.bytes_up += partition.published.nbytes
        if partition.drift is not None:
            partition.drift.zero_()
        if index == 0:
            self._probe.predicted(weights, partition.master)

    def _finish_step(self) -> None:
        plan = self._plan
        assert plan is not None, "end_step without begin_step"
        if plan.rule is WeightRule.EXACT:
            if plan.publish_ahead:
                self._read_results()
                self._publish_ahead()
            else:
                # Weights that were copied from the arena on this stream are read by the next all-gather on DeepSpeed's
                # own, which does not wait for this one. Every other step ends with this wait too.
                self.link.transfers.finish()
        elif plan.handed_over:
            self._submit(range(len(self.partitions)), None)
        else:
            self.link.transfers.finish()
        self.last_clip = self._clip

    def _advance(self) -> None:
        assert self._plan is not None, "end_step without begin_step"
        self.schedule.advance(self._plan)
        self._plan = None
        if self.schedule.wants_interval:
            self._measure_interval()

    def _publish_ahead(self) -> None:
        """Let the worker publish what the first predicted step builds on."""
        for partition in self.partitions:
            last = self._constants(partition.group, self.updates + 1, 1.0)
            partition.publish = publish_ahead(last, self._interval)
        self._publish_again()

    def _publish_again(self) -> None:
        """Let the worker recompute y and the block means from p, m, v, by each partition's `publish`."""
        self._unread = True
        self.link.send(
            [PartitionPass(index, (), (), p.publish) for index, p in enumerate(self.partitions)], gradients=0
        )

    def _submit(self, indices: Sequence[int], publish: Publish | None) -> None:
        """Hand over the collected gradients of partitions; `publish` None: extrapolate over the next interval."""
        assert self._plan is not None
        passes = []
        for index in indices:
            partition = self.partitions[index]
            steps = tuple(partition.collected)
            partition.collected.clear()
            partition.publish = publish or publish_ahead(steps[-1], self._interval)
            passes.append(PartitionPass(index, self._places(len(steps)), steps, partition.publish))
        self._unread = True
        self.link.send(passes, gradients=len(passes[0].steps) if passes else 0)

    def _read_results(self) -> None:
        """Take the block means of the newest result into the estimators, unless that has been done."""
        if not self._unread:
            return
        self._unread = False
        for index, partition in enumerate(self.partitions):
            publish = partition.publish
            means = partition.block_means.to(self.device_of(index), copy=True)
            partition.estimator = Estimator(means, self.block_size, publish.bias_correction2_sqrt, publish.eps)
        self._probe.arrived(self.partitions[0].master, self.figures)

    def _measure_interval(self) -> None:
        worker, device, mine = 0.0, 0.0, 1
        with self.link.keeping():
            worker, device = self.figures.typical()
            mine = smallest_interval(worker, device, MEASURED_INTERVAL_LIMIT)
        interval = -self.ranks.minimum(-mine)[0]
        with self.link.keeping():
            self._choose_interval(interval)
        if self.ranks.rank == 0:
            logger.info(
                f"zenflow.update_interval = {interval}: a pass of the optimizer process takes {worker * 1e3:.1f} ms, "
                f"the accelerator {device * 1e3:.1f} ms a step"
            )
            if is_overloaded(worker, device, interval):
                logger.warning(
                    "the optimizer process is slower than the accelerator even so, and steps will wait for it: give it "
                    "more cores (zenflow.pt_reserved_cores), or do more work in a step"
                )

    @property
    def _interval(self) -> int:
        interval = self.schedule.interval
        assert interval is not None
        return interval

    # -- state ----------------------------------------------------------------------------------------------------

    def state_beside_weights(self, index: int) -> list[torch.Tensor]:
        partition = self.partitions[index]
        kept = [partition.drift, None if partition.estimator is None else partition.estimator.inverse]
        return [tensor for tensor in kept if tensor is not None]

    def saved_partition(self, index: int) -> dict[str, Any]:
        partition = self.partitions[index]
        return {
            "publish": asdict(partition.publish),
            "last_clip": self.last_clip,
            "drift": None if partition.drift is None else partition.drift.cpu().clone(),
            "inverse": None if partition.estimator is None else partition.estimator.inverse.cpu().clone(),
        }

    def restore_partition(self, index: int, values: PredictedPartitionValues) -> None:
        partition, device = self.partitions[index], self.device_of(index)
        partition.publish = values.publish.make()
        self.last_clip = values.last_clip
        partition.drift = None if values.drift is None else values.drift.to(device)
        if values.inverse is not None:
            partition.estimator = Estimator.remembering(values.inverse.to(device), self.block_size)

    def resume(self) -> None:
        if self.schedule.plan().rule is not WeightRule.EXACT:
            self._publish_again()

    def can_use_interval(self, interval: int | None) -> bool:
        return super().can_use_interval(interval) or not self._settings.overlapped

    def can_continue(self, schedule: dict[str, Any]) -> bool:
        return self._settings.overlapped or not schedule["position"]

    def masters_changed(self) -> None:
        super().masters_changed()
        for partition in self.partitions:
            partition.estimator = None
            if partition.drift is not None:
                partition.drift.zero_()
