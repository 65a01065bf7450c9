"""The selective rule, ZenFlow as published: hot blocks step on the accelerator every time, cold ones now and then.

Hot are the blocks with the largest gradients. Their p, m, v (fp32) and update count live beside the weights and move
there and back where blocks are chosen anew; nothing is reset or rounded. Of the cold ones the worker makes one exact
Adam step an interval, with the mean of the clipped gradients. Every block counts its own updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import get_accelerator
from deepspeed_ext.zenflow.checkpoint_section import SelectedPartitionValues
from deepspeed_ext.zenflow.optimizer import MEASURED_INTERVAL_LIMIT, OffloadedAdam
from deepspeed_ext.zenflow.partition import GradFactor, PartitionState
from deepspeed_ext.zenflow.selective.blocks import AdamBlocks, BlockSet, scores, select
from deepspeed_ext.zenflow.selective.schedule import (
    SelectivePlan,
    SelectiveSchedule,
    ring_of,
    steps_between_selections,
    warn_of_unknown_epoch,
)
from deepspeed_ext.zenflow.worker.messages import MeanPartitionPass

__all__ = ["SelectedPartition", "SelectiveAdam"]

AWAY = -1
"""Update count of a block in the arena while it is hot: the worker leaves it alone."""


@dataclass
class SelectedPartition(PartitionState):
    """What the trainer holds of one partition of n elements.

    Attributes:
        updates: how many each block has had; int32, in the arena; `AWAY` for a hot one.
        hot: p, m, v and update counts of the hot blocks; None before the first selection.
        hot_weights: within a step: what the hot blocks' weights become, in the weights' dtype, on the accelerator.
        scores: by which hot blocks are being selected in this step; None in most steps.
    """

    updates: torch.Tensor
    hot: AdamBlocks | None = None
    hot_weights: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class SelectiveAdam(OffloadedAdam[SelectedPartition]):
    """`OffloadedAdam` that steps some blocks on the accelerator and the others every interval on the host."""

    rule = "selective"
    per_block = ("updates", "int32")
    schedule: SelectiveSchedule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs["settings"]
        self.schedule = SelectiveSchedule(settings)
        warn_of_unknown_epoch(settings)
        self._plan: SelectivePlan | None = None
        self._sums = [0.0, 0.0]  # of absolute gradients, a block: hot, cold
        super().__init__(*args, **kwargs)

    @property
    def block_size(self) -> int:
        return self._settings.select_block_size

    @property
    def _room(self) -> int:
        lag = self._settings.overlap_lag if self._settings.overlapped else 0
        return ring_of(self._settings.update_interval or max(MEASURED_INTERVAL_LIMIT, lag), lag)

    def _partition(self, index: int, group: int) -> SelectedPartition:
        p, m, v, y, updates = (self._array(kind, index) for kind in ("p", "m", "v", "y", "updates"))
        return SelectedPartition(group, p.requires_grad_(), m, v, y, self._ring(index), updates=updates)

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        self._plan = self.schedule.plan()
        if self._plan.applies:
            self.link.receive()

    def _step_partition(self, index: int, grad: torch.Tensor, factor: GradFactor) -> None:
        plan, partition = self._plan, self.partitions[index]
        assert plan is not None, "step_partition outside of a step"
        grad = self._collect(index, grad, factor.value)
        if partition.hot is not None:
            hot_grad = partition.hot.blocks.take(grad)
            stepped = partition.hot.step(hot_grad, factor.value, partition.collected[-1])
            partition.hot_weights = stepped.to(self._weights(index).dtype)
        if plan.selects:
            partition.scores = scores(grad, self.block_size)
        if plan.waits:  # the worker steps this partition while the next gradient is made ready
            self.link.send([self._task(index)], gradients=plan.handed_over)

    def _finish_partitions(self) -> None:
        plan = self._plan
        assert plan is not None, "step_partition outside of a step"
        if plan.waits:
            self.link.receive()
        chosen = [self._everyones_scores(index) for index in range(len(self.partitions))] if plan.selects else []
        with self.link.keeping():
            for index in range(len(self.partitions)):
                self._write_weights(index, arrived=plan.applies or plan.waits)
                if plan.selects:
                    self._select(index, chosen[index])

    def _write_weights(self, index: int, arrived: bool) -> None:
        """Weights of the cold blocks, if the worker's result has arrived, and of the hot ones over them."""
        if arrived:
            self._take_published(index)
        partition = self.partitions[index]
        if partition.hot is not None:
            assert partition.hot_weights is not None, "hot blocks have not been stepped"
            partition.hot.blocks.put(self._weights(index), partition.hot_weights)
            partition.hot_weights = None

    def _task(self, index: int) -> MeanPartitionPass:
        """The step of the cold blocks with what has been collected, which is thereby handed over."""
        assert self._plan is not None
        collected = self.partitions[index].collected
        scales = tuple(step.grad_scale / len(collected) for step in collected)
        task = MeanPartitionPass(index, self._places(len(collected)), scales, collected[-1])
        collected.clear()
        return task

    def _finish_step(self) -> None:
        plan = self._plan
        assert plan is not None, "end_step without begin_step"
        if plan.handed_over and not plan.waits:
            tasks = [self._task(index) for index in range(len(self.partitions))]
            self.link.send(tasks, gradients=plan.handed_over)
        else:
            self.link.transfers.finish()

    def _advance(self) -> None:
        plan = self._plan
        assert plan is not None, "end_step without begin_step"
        self.schedule.advance(plan)
        self._plan = None
        if self.schedule.interval is None and plan.selects:
            self._measure_interval()

    # -- selection ------------------------------------------------------------------------------------------------

    def _everyones_scores(self, index: int) -> list[torch.Tensor]:
        """The scores of a partition's blocks on every rank; nobody has failed, since all have just waited together."""
        scores = self.partitions[index].scores
        assert scores is not None, "a step that selects waits first"
        return self.ranks.all_gather(scores)

    @torch.no_grad()
    def _select(self, index: int, everyones_scores: list[torch.Tensor]) -> None:
        """Choose the hot blocks of a partition anew, by all ranks' scores; nothing is in flight."""
        partition, block_scores = self.partitions[index], everyones_scores[self.ranks.rank]
        self._bring_home(index)
        chosen = select(torch.stack(everyones_scores), self._settings.topk_ratio)
        blocks = BlockSet(chosen[self.ranks.rank], partition.master.numel(), self.block_size)
        if self.schedule.interval is None:
            hot = float(block_scores[blocks.ids].sum())
            self._sums[0] += hot
            self._sums[1] += float(block_scores.sum()) - hot
        partition.hot = self._take_away(partition, blocks)
        partition.updates[blocks.ids.cpu()] = AWAY
        partition.scores = None

    def _take_away(self, partition: SelectedPartition, blocks: BlockSet) -> AdamBlocks:
        """Copies of the state of `blocks`, where hot state lives."""

        def moved(rows: torch.Tensor) -> torch.Tensor:
            if self._settings.offload:
                return get_accelerator().pin_memory(rows)
            return rows.to(blocks.ids.device)

        p, m, v = (moved(blocks.take(array)) for array in self._state(partition))
        return AdamBlocks(blocks, p, m, v, moved(partition.updates[blocks.ids.cpu()]))

    @staticmethod
    def _state(partition: SelectedPartition) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, m, v in the arena."""
        return partition.master.detach(), partition.exp_avg, partition.exp_avg_sq

    @torch.no_grad()
    def _write_back(self, index: int) -> None:
        """Copy p, m, v of the hot blocks into the arena, where the worker leaves them alone."""
        partition = self.partitions[index]
        if (hot := partition.hot) is not None:
            if self._settings.offload:
                get_accelerator().synchronize()  # the newest step's state may still be on its way to the host
            for array, rows in zip(self._state(partition), (hot.p, hot.m, hot.v), strict=True):
                hot.blocks.put(array, rows)

    def _bring_home(self, index: int) -> None:
        """Make the hot blocks cold: their state and count are the arena's again."""
        partition = self.partitions[index]
        self._write_back(index)
        partition.updates.copy_(self._all_updates(partition))
        partition.hot = None

    def _all_updates(self, partition: SelectedPartition) -> torch.Tensor:
        """The update counts of all blocks, hot ones included; int32, host."""
        updates = partition.updates.clone()
        if partition.hot is not None:
            updates[partition.hot.blocks.ids.cpu()] = partition.hot.updates.cpu()
        return updates

    def _measure_interval(self) -> None:
        """The interval after which cold gradients have added up to what a hot one has in a step."""
        mean_hot = mean_cold = 0.0
        mine = 1
        with self.link.keeping():
            mean_hot, mean_cold = self._mean_gradients()
            mine = math.ceil(self._settings.auto_ratio * mean_hot / mean_cold) if mean_cold > 0 else 1
        lowest = self._settings.overlap_lag if self._settings.overlapped else 1
        highest = min(MEASURED_INTERVAL_LIMIT, steps_between_selections(self._settings, 1) or MEASURED_INTERVAL_LIMIT)
        interval = max(lowest, min(highest, -self.ranks.minimum(-mine)[0]))
        with self.link.keeping():
            self._choose_interval(interval)
        if self.ranks.rank == 0:
            logger.info(
                f"zenflow.update_interval = {interval}: a cold block has {mean_cold / max(mean_hot, 1e-30):.2f} "
                "of a hot one's gradient"
            )

    def _mean_gradients(self) -> tuple[float, float]:
        """Mean score of the blocks that were selected first, and of the others."""
        hot = sum(len(p.hot.blocks) for p in self.partitions if p.hot is not None)
        cold = sum(p.updates.numel() for p in self.partitions) - hot
        return self._sums[0] / max(1, hot), self._sums[1] / max(1, cold)

    # -- state ----------------------------------------------------------------------------------------------------

    def changed_blocks(self, index: int) -> BlockSet | None:
        """Inside a step: the blocks whose weights this step changes, None if all may change."""
        plan, hot = self._plan, self.partitions[index].hot
        assert plan is not None
        return None if hot is None or plan.applies or plan.waits else hot.blocks

    def drain(self) -> None:
        super().drain()
        if self._exposed:  # then the arena holds what is true
            return
        for index in range(len(self.partitions)):
            self._write_back(index)

    @property
    def _bound_updates(self) -> list[int]:
        return [self.updates] * len(self.partitions)  # the hot blocks': there is no place for a count a block

    def adopt_update_count(self, updates: int) -> None:
        super().adopt_update_count(updates)
        for partition in self.partitions:
            partition.updates.fill_(updates)
            partition.hot = None

    def can_continue(self, schedule: dict[str, Any]) -> bool:
        in_flight = schedule["in_flight"]
        return in_flight is None or (self._settings.overlapped and in_flight < self._settings.overlap_lag)

    def state_beside_weights(self, index: int) -> list[torch.Tensor]:
        hot = self.partitions[index].hot
        return [] if hot is None else [hot.p, hot.m, hot.v, hot.updates, hot.blocks.ids]

    def saved_partition(self, index: int) -> dict[str, Any]:
        partition = self.partitions[index]
        return {
            "block_updates": self._all_updates(partition),
            "hot_blocks": None if partition.hot is None else partition.hot.blocks.ids.cpu(),
        }

    def restore_partition(self, index: int, values: SelectedPartitionValues) -> None:
        partition = self.partitions[index]
        partition.updates.copy_(values.block_updates)
        if values.hot_blocks is not None:
            ids = values.hot_blocks.to(self.device_of(index))
            blocks = BlockSet(ids, partition.master.numel(), self.block_size)
            partition.hot = self._take_away(partition, blocks)
            partition.updates[values.hot_blocks] = AWAY

    @torch.no_grad()
    def resume(self) -> None:
        for partition in self.partitions:
            if (hot := partition.hot) is not None:
                for array, rows in zip(self._state(partition), (hot.p, hot.m, hot.v), strict=True):
                    rows.copy_(hot.blocks.take(array))
        if self.schedule.state.in_flight is not None:
            idle = [
                MeanPartitionPass(index, (), (), self._constants(partition.group, 1, 1.0))
                for index, partition in enumerate(self.partitions)
            ]
            self.link.send(idle, gradients=0)

    def masters_changed(self) -> None:
        super().masters_changed()
        for partition in self.partitions:
            partition.updates.copy_(self._all_updates(partition))
            partition.hot = None

    def measurements(self) -> dict[str, float]:
        figures = super().measurements()
        return {name: value for name, value in figures.items() if not name.endswith("_error")}  # nothing is predicted
