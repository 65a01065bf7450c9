"""The optimizer as the ZeRO subclasses see it: gradients of partitions go in, weights come out.

The subclass owns parameters and communication; this class owns the arena, the worker, the schedule and the estimate.
One optimizer step of the subclass is `begin_step`, `step_partition` for each partition in order, `end_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_ext import memory
from deepspeed_ext._agreement import RankGroup, require_same_plan
from deepspeed_ext._errors import DeepSpeedExtError, OutOfMemoryError, WorkerError
from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import dist
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.adam_settings import adam_step, is_decoupled, step_value
from deepspeed_ext.zenflow.arena import Arena, plan_layout
from deepspeed_ext.zenflow.figures import Figures, PredictionProbe
from deepspeed_ext.zenflow.kernel import AdamStep, Publish, library_path
from deepspeed_ext.zenflow.messages import PartitionPass, WorkerPlan, array_name, partition_specs
from deepspeed_ext.zenflow.predict import Estimator, drift_coefficient, move_coefficient, publish_ahead
from deepspeed_ext.zenflow.process import OptimizerProcess
from deepspeed_ext.zenflow.schedule import Schedule, StepPlan, WeightRule, is_overloaded, smallest_interval
from deepspeed_ext.zenflow.seat import WorkerSeat
from deepspeed_ext.zenflow.transfers import Transfers

__all__ = ["GradFactor", "OffloadedAdam", "PartitionState"]

SLOTS = 2
MEASURED_INTERVAL_LIMIT = 8


@dataclass(frozen=True)
class GradFactor:
    """What a gradient is multiplied with: ``c = unscale / clip``, and apart, because the clip may be the last one."""

    unscale: float
    clip: float

    @property
    def value(self) -> float:
        """c."""
        return self.unscale * self.clip


@dataclass
class PartitionState:
    """What the trainer holds of one partition of n elements.

    Attributes:
        group: index of its parameter group.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32; the worker's while a submission is in flight.
        published, block_means: y and the means of v in the arena.
        slots: gradients in the arena, by slot and position.
        collected: constants of the gradients in the current slot that have not been handed over.
        publish: how y follows or will follow from p, m, v.
        estimator: made from the newest block means; None before the first result.
        drift: D, 16 bit, accelerator; None at interval 1.
    """

    group: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    published: torch.Tensor
    block_means: torch.Tensor
    slots: list[list[torch.Tensor]]
    publish: Publish
    collected: list[AdamStep] = field(default_factory=list)
    estimator: Estimator | None = None
    drift: torch.Tensor | None = None


class OffloadedAdam:
    """Adam in a process of its own.

    Args:
        masters: fp32 values to start from, one tensor a partition; copied into the arena.
        groups: index of the parameter group of each partition.
        weights: returns the 16-bit weights of a partition, 1-D, on whatever device; written in place.
        optimizer: holds hyperparameters and, for checkpoints, state; it never steps itself.
        weights_dtype: of the weights.
        grad_dtype: of the gradients as they are handed over.
        settings: the ``zenflow`` section.
        ranks: the data-parallel ranks; all of them make one of these, with partitions in the same order.
        seat: where the worker runs.

    Attributes:
        partitions: their state, in order.
        updates: optimizer steps whose gradient has been taken so far (t of the newest).
        schedule, figures: see there.

    Raises:
        ConfigError: the optimizer is not an Adam.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena.
        WorkerError: the worker does not start, or another rank has one of these errors.
    """

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
        self._ranks = ranks
        self._transfers = Transfers()
        self._probe = PredictionProbe()
        self.figures = Figures()
        self.schedule = Schedule(settings.update_interval, settings.overlapped, settings.warm_up_steps)
        self.updates = 0
        self._plan: StepPlan | None = None
        self.last_clip: float | None = None
        self._clip: float | None = None
        self._error: DeepSpeedExtError | None = None
        self._in_flight_gradients = 0
        self._unread = False
        agreed = (settings.model_dump(exclude={"pt_reserved_cores", "pt_reserved_cores_perc"}), list(groups))
        require_same_plan("ZenFlow", agreed, ranks)
        self._open(masters, groups, _name(settings.publish_dtype or weights_dtype), _name(grad_dtype), seat)

    def _open(
        self,
        masters: Sequence[torch.Tensor],
        groups: Sequence[int],
        publish_dtype: str,
        grad_dtype: str,
        seat: WorkerSeat,
    ) -> None:
        settings = self._settings
        interval = 1
        if settings.overlapped:
            interval = settings.update_interval or MEASURED_INTERVAL_LIMIT
        specs = [
            spec
            for index, master in enumerate(masters)
            for spec in partition_specs(
                index,
                master.numel(),
                block_size=settings.block_size,
                publish_dtype=publish_dtype,
                grad_dtype=grad_dtype,
                slots=SLOTS,
                interval=interval,
            )
        ]
        layout = plan_layout(specs)
        # Slots of a longer interval than the first are touched, and so take memory, only once they are used.
        touch = tuple(spec.name for spec in specs if not spec.name.startswith("g.") or spec.name.endswith(".0"))
        needed = sum(spec.nbytes for spec in specs if spec.name in set(touch))
        place = None if seat.place is None else str(seat.place)
        plan = WorkerPlan(layout, settings.block_size, touch, place, seat.threads, library_path())
        error = None
        try:
            _require_room(needed)
            self.arena = Arena.create(layout)
            self.process = OptimizerProcess(
                self.arena, plan, rank=dist.get_rank(), timeout_seconds=settings.worker_timeout_seconds
            )
        except DeepSpeedExtError as failure:
            error = failure
        self._require_all(error)
        self.partitions = [self._partition(index, group, interval) for index, group in enumerate(groups)]
        if self.process.ready.warning:
            logger.warning(f"rank {dist.get_rank()}: the optimizer process {self.process.ready.warning}")
        for partition, master in zip(self.partitions, masters, strict=True):
            partition.master.data.copy_(master)
        exchanged = [name for name in touch if name.startswith(("y.", "g.", "block_means."))]
        self._transfers.lock([self.arena.tensor(name) for name in exchanged])
        self.bind_state()

    def _partition(self, index: int, group: int, interval: int) -> PartitionState:
        p, m, v, y, means = (self.arena.tensor(array_name(k, index)) for k in ("p", "m", "v", "y", "block_means"))
        slots = [[self.arena.tensor(array_name("g", index, s, k)) for k in range(interval)] for s in range(SLOTS)]
        exact = Publish.exact(1.0, float(self._optimizer.param_groups[group]["eps"]))
        return PartitionState(group, p.requires_grad_(), m, v, y, means, slots, exact)

    def bind_state(self) -> None:
        """Let the optimizer's state be the arena's p, m, v, under the masters as parameters."""
        for partition in self.partitions:
            self._optimizer.state[partition.master] = {
                "step": step_value(self._optimizer, self.updates - len(partition.collected)),
                "exp_avg": partition.exp_avg,
                "exp_avg_sq": partition.exp_avg_sq,
            }

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """An optimizer step that will be applied begins; waits for the update in flight if the weights need it.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        self.figures.begin_step()
        self._plan = self.schedule.plan()
        if self._plan.waits_first:
            self._receive()
        if self._plan.rule is WeightRule.PREDICTED:
            self._read_results()

    def step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        """Take the gradient of a partition and write its new weights.

        Args:
            index: of the partition; all of them, in order, between `begin_step` and `end_step`.
            grad: 1-D, n elements, reduced, neither unscaled nor clipped; may be reused after the call.
            factor: what it is to be multiplied with.
        """
        plan, partition = self._plan, self.partitions[index]
        assert plan is not None, "step_partition outside of a step"
        slot = partition.slots[plan.slot][plan.position]
        if grad.dtype != slot.dtype:
            grad = grad.to(slot.dtype)
        self._transfers.to_host(grad, slot)
        self.figures.bytes_down += slot.nbytes
        group = self._optimizer.param_groups[partition.group]
        step = adam_step(group, self._decoupled, self.updates + 1, factor.value)
        partition.collected.append(step)
        if plan.rule is WeightRule.EXACT:
            self._step_exactly(index)
        else:
            previous = self._settings.predict_clip == "previous" and self.last_clip is not None
            scale = factor.unscale * (self.last_clip or 1.0) if previous else factor.value
            self._estimate(index, plan, step, grad, scale)
        self._clip = factor.clip

    def _step_exactly(self, index: int) -> None:
        partition = self.partitions[index]
        last = partition.collected[-1]
        self._submit([index], Publish.exact(last.bias_correction2_sqrt, last.eps))
        self._receive()
        weights = self._weights(index)
        weights.copy_(partition.published, non_blocking=True)
        self.figures.bytes_up += partition.published.nbytes

    def _estimate(self, index: int, plan: StepPlan, step: AdamStep, grad: torch.Tensor, scale: float) -> None:
        partition, weights = self.partitions[index], self._weights(index)
        interval, position = self._interval, plan.position + 1
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

    def end_step(self) -> None:
        """Hand over what the schedule says. Does not wait, and raises nothing that the next wait would not."""
        plan = self._plan
        assert plan is not None, "end_step without begin_step"
        everything = list(range(len(self.partitions)))
        if plan.rule is WeightRule.EXACT:
            if plan.publish_ahead:
                self._read_results()
                self._publish_ahead()
        elif plan.handed_over:
            self._submit(everything, None)
        else:
            self._transfers.finish()
        self.updates += 1
        self.last_clip = self._clip
        self.schedule.advance(plan)
        self._plan = None
        if self.schedule.wants_interval:
            self._choose_interval()
        self.figures.end_step()

    def _publish_ahead(self) -> None:
        """Let the worker publish what the first predicted step builds on."""
        for partition in self.partitions:
            group = self._optimizer.param_groups[partition.group]
            last = adam_step(group, self._decoupled, self.updates + 1, 1.0)
            partition.publish = publish_ahead(last, self._interval)
        self.publish_again()

    def publish_again(self) -> None:
        """Let the worker recompute y and the block means from p, m, v, by each partition's `publish`."""
        passes = [PartitionPass(index, 0, (), (), p.publish) for index, p in enumerate(self.partitions)]
        self._send(passes, gradients=0)

    def _submit(self, indices: Sequence[int], publish: Publish | None) -> None:
        """Hand over the collected gradients of partitions; `publish` None: extrapolate over the next interval."""
        assert self._plan is not None
        passes = []
        for index in indices:
            partition = self.partitions[index]
            steps = tuple(partition.collected)
            partition.collected.clear()
            partition.publish = publish or publish_ahead(steps[-1], self._interval)
            passes.append(PartitionPass(index, self._plan.slot, tuple(range(len(steps))), steps, partition.publish))
        self._send(passes, gradients=len(passes[0].steps) if passes else 0)

    def _send(self, passes: Sequence[PartitionPass], gradients: int) -> None:
        self._transfers.finish()
        self._in_flight_gradients = gradients
        self._unread = True
        if self._error is None:
            try:
                self.process.submit(passes)
            except WorkerError as error:  # told to all ranks together, at the next wait
                self._error = error

    # -- waiting --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for everything in flight, on all ranks."""
        begin = time.perf_counter()
        self._require_all(self._wait())
        self.figures.wait_seconds += time.perf_counter() - begin

    def _read_results(self) -> None:
        """Take the block means of the newest result into the estimators, unless that has been done."""
        if not self._unread:
            return
        self._unread = False
        for index, partition in enumerate(self.partitions):
            publish, device = partition.publish, self._weights(index).device
            means = partition.block_means.to(device, copy=True)
            partition.estimator = Estimator(
                means, self._settings.block_size, publish.bias_correction2_sqrt, publish.eps
            )
        self._probe.arrived(self.partitions[0].master, self.figures)

    def _wait(self) -> DeepSpeedExtError | None:
        if self._error is not None:
            return self._error
        try:
            busy = self.process.busy
            done = self.process.wait()
        except WorkerError as error:
            self._error = error
            return error
        if busy:
            self.figures.note_worker(done.seconds, self._in_flight_gradients)
        return None

    def _require_all(self, error: DeepSpeedExtError | None) -> None:
        """Raise on every rank if any has an error, with the message of the one that has it."""
        if self._ranks.all(error is None):
            return
        messages = self._ranks.gather(None if error is None else str(error))
        self._error = error or WorkerError("; ".join(m for m in messages if m))
        if hasattr(self, "process"):
            self.process.close()
        raise self._error

    def drain(self) -> None:
        """Wait until p, m, v hold every gradient that was handed over. Changes nothing about what follows.

        Raises:
            WorkerError: this rank's worker has failed.
        """
        if (error := self._wait()) is not None:
            raise error

    def drain_together(self) -> None:
        """`drain`, as a collective.

        Raises:
            WorkerError: on every rank, if the worker of any has failed.
        """
        self._require_all(self._wait())

    def _choose_interval(self) -> None:
        worker, device = self.figures.typical()
        mine = smallest_interval(worker, device, MEASURED_INTERVAL_LIMIT)
        interval = -self._ranks.minimum(-mine)[0]
        self.schedule.choose_interval(interval)
        if self._ranks.rank == 0:
            logger.info(
                f"zenflow.update_interval = {interval}: a pass of the optimizer process takes {worker * 1e3:.1f} ms, "
                f"the accelerator {device * 1e3:.1f} ms a step"
            )
            if is_overloaded(worker, device, interval):
                logger.warning(
                    "the optimizer process is slower than the accelerator even so, and steps will wait for it: give it "
                    "more cores (zenflow.pt_reserved_cores), or do more work in a step"
                )

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def _interval(self) -> int:
        interval = self.schedule.state.interval
        assert interval is not None
        return interval

    @property
    def block_size(self) -> int:
        """Elements of a block of v."""
        return self._settings.block_size

    @property
    def overlapped(self) -> bool:
        """Whether steps after the warm-up are overlapped."""
        return self._settings.overlapped

    def can_use_interval(self, interval: int | None) -> bool:
        """Whether a run at `interval` can continue under these settings."""
        configured = self._settings.update_interval
        return interval == configured or configured is None or not self.overlapped

    def device_of(self, index: int) -> torch.device:
        """Where the weights of a partition are."""
        return self._weights(index).device

    def apply_gradient(self, index: int, gradient: torch.Tensor, step: AdamStep) -> None:
        """Carry out one step of one partition at once, outside of the schedule; weights are not touched."""
        partition = self.partitions[index]
        partition.slots[0][0].copy_(gradient)
        publish = Publish.exact(step.bias_correction2_sqrt, step.eps)
        self._send([PartitionPass(index, 0, (0,), (step,), publish)], gradients=1)
        self.drain()

    def masters_changed(self) -> None:
        """p, m or v were written from outside (nothing was in flight): begin anew from them, without a prediction."""
        self.schedule.restart()
        for partition in self.partitions:
            partition.collected.clear()
            partition.estimator = None
            if partition.drift is not None:
                partition.drift.zero_()

    def resident_bytes(self) -> int:
        """Host memory that the arena takes now."""
        return self.arena.resident_bytes()

    def measurements(self) -> dict[str, float]:
        """The last step's figures by name; units are in the names."""
        return {
            f"zenflow_{name}": value for name, value in self.figures.as_dict(self.schedule.state.interval or 1).items()
        }

    def close(self) -> None:
        """End the worker. Masters and moments stay readable. Idempotent."""
        self.process.close()
        self._transfers.unlock()
        self.arena.close()


def _require_room(nbytes: int) -> None:
    available = memory.available_host_bytes()
    if nbytes > available:
        raise OutOfMemoryError(
            f"rank {dist.get_rank()}: the optimizer's state takes {nbytes:,} bytes of host memory and "
            f"{available:,} are available: use more ranks, a smaller zenflow.update_interval or more memory"
        )


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
