"""Implements the selective rule, ZenFlow as published: hot blocks step on the accelerator at every
step, cold blocks once per interval on the host.

Hot blocks are those with the largest gradients. Their p, m, v (fp32) and update counts live outside
the arena and move there and back at each selection; nothing is reset or rounded. Once per interval
the worker makes one exact Adam step of the cold blocks with the mean of the clipped gradients.
Every block counts its own updates.

Source: ZenFlow (Lan et al., 2025, arXiv 2505.12242). DeepSpeed's implementation selects columns
instead of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.rules.blocks import AdamBlocks, BlockSet
from deepspeed_ext.zenflow.rules.selective.saved import SelectivePartitionValues
from deepspeed_ext.zenflow.rules.selective.schedule import SelectivePlan, SelectiveSchedule
from deepspeed_ext.zenflow.rules.selective.selection import scores, select
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.worker.messages import MeanPartitionPass

__all__ = ["SelectionState", "SelectiveRule"]

_FLOAT_BYTES = 4
AWAY = -1
"""Update count in the arena that marks a hot block: its state is outside the arena, and the worker
skips it."""


@dataclass
class SelectionState:
    """State of the rule for one partition of n elements.

    Attributes:
        hot: p, m, v and update counts of the k hot blocks; None before the first selection.
        hot_weights: during a step, the new weights of the hot blocks, [k, block_size], dtype of the
            weights, accelerator.
        scores: during a step that selects, this rank's score of each block, 1-D fp32 [blocks].
        pages: page-locked host memory with the state of the hot blocks; None: the state is on the
            accelerator.
    """

    hot: AdamBlocks | None = None
    hot_weights: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    pages: torch.Tensor | None = None


class SelectiveRule(UpdateRule[SelectivePlan]):
    """Steps hot blocks on the accelerator, and cold blocks once per interval on the host.

    Attributes:
        states: state of each partition, in order. The per-block array in the arena holds the update
            counts.
    """

    name = "selective"
    shows_collected = True  # the count exposed per partition is that of the hot blocks
    schedule: SelectiveSchedule

    def __init__(
        self,
        plan: ZenFlowPlan,
        partitions: Sequence[Partition],
        link: WorkerLink,
        ranks: RankGroup,
        kind: OptimizerKind,
        metrics: Metrics,
    ) -> None:
        settings = plan.rule
        assert isinstance(settings, SelectiveSettings)
        schedule = SelectiveSchedule(settings, plan.arrival)
        super().__init__(settings.block_size, schedule, partitions, link, metrics)
        self.states = [SelectionState() for _ in partitions]
        self._settings = settings
        self._ranks = ranks
        self._kind = kind
        self._hot_sum = self._cold_sum = 0.0  # sums of scores at the first selection

    # -- one optimizer step ------------------------------------------------------------------------

    def step_partition(self, plan: SelectivePlan, partition: Partition, grad: torch.Tensor) -> None:
        state = self.states[partition.index]
        if plan.applies:
            self._take_published(partition)
        if state.hot is not None:
            stepped = state.hot.step(state.hot.blocks.take(grad), partition.collected[-1])
            state.hot_weights = stepped.to(partition.weights().dtype)
        if plan.selects:
            state.scores = scores(grad, self.block_size)

    def task(self, plan: SelectivePlan, partition: Partition) -> MeanPartitionPass:
        collected = partition.collected
        scales = tuple(step.grad_scale / len(collected) for step in collected)
        task = MeanPartitionPass(
            partition.index, self._slots(len(collected)), scales, collected[-1]
        )
        collected.clear()
        return task

    def write_weights(self, plan: SelectivePlan) -> None:
        """Write the weights of cold blocks if the worker's result has arrived, then those of hot
        blocks."""
        chosen: list[torch.Tensor] = []
        for partition, state in (
            zip(self._partitions, self.states, strict=True) if plan.selects else ()
        ):
            assert state.scores is not None, (
                "a step that selects waits first, so no rank has failed"
            )
            chosen.append(
                select(
                    state.scores,
                    self._settings.topk_ratio,
                    partition.ranks,
                    self._link.deferring_errors,
                )
            )
        with self._link.deferring_errors():
            for partition, state in zip(self._partitions, self.states, strict=True):
                if plan.waits:
                    self._take_published(partition)
                if state.hot is not None:
                    assert state.hot_weights is not None, "hot blocks have not been stepped"
                    state.hot.blocks.put(partition.weights(), state.hot_weights)
                    state.hot_weights = None
                if plan.selects and not self._link.failed:
                    self._take_hot(partition, chosen[partition.index])
        if plan.selects:  # a rank with other hot blocks would call other collectives in later steps
            self._link.raise_deferred()

    def measured_interval(self, plan: SelectivePlan) -> int | None:
        """Choose the interval over which a cold block's gradients add up to a hot block's gradient
        of one step."""
        if self.schedule.interval is not None or not plan.selects:
            return None
        mean_hot = mean_cold = 0.0
        mine = 1
        with self._link.deferring_errors():
            mean_hot, mean_cold = self._mean_scores()
            mine = (
                math.ceil(self._settings.auto_ratio * mean_hot / mean_cold) if mean_cold > 0 else 1
            )
        longest = self._settings.longest_interval
        interval = max(self._settings.lag or 1, min(longest, -self._ranks.minimum(-mine)[0]))
        if self._ranks.rank == 0:
            logger.info(
                f"zenflow.update_interval = {interval}: a cold block's mean gradient is "
                f"{mean_cold / max(mean_hot, 1e-30):.2f} of a hot block's"
            )
        return interval

    # -- selection ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _take_hot(self, partition: Partition, chosen: torch.Tensor) -> None:
        """Make the `chosen` blocks of a partition its hot blocks. Nothing may be in flight."""
        state = self.states[partition.index]
        assert state.scores is not None
        self._make_cold(partition)
        blocks = BlockSet(chosen, partition.master.numel(), self.block_size)
        if self.schedule.interval is None:
            hot = float(state.scores[blocks.ids].sum())
            self._hot_sum += hot
            self._cold_sum += float(state.scores.sum()) - hot
        state.hot = self._taken_away(partition, blocks)
        state.scores = None

    def _taken_away(self, partition: Partition, blocks: BlockSet) -> AdamBlocks:
        """Copy the state of `blocks` from the arena to where hot blocks keep it, and mark them
        there."""
        room: Iterator[torch.Tensor] | None = None
        if self._settings.keeps_hot_on_host:
            pages = allocation.host_pages(self._settings.hot_state_bytes(len(blocks)))
            self._link.page_locks.lock([pages])
            self.states[partition.index].pages = pages
            room = iter(
                pages.split(len(blocks) * self.block_size * _FLOAT_BYTES)
                if len(blocks)
                else [pages] * 4
            )

        def moved(rows: torch.Tensor) -> torch.Tensor:
            if room is None:
                return rows.to(blocks.ids.device)
            return next(room)[: rows.nbytes].view(rows.dtype).view_as(rows).copy_(rows)

        ids = blocks.ids.cpu()
        p, m, v = (moved(blocks.take(array)) for array in partition.state)
        hot = AdamBlocks(blocks, p, m, v, moved(partition.per_block[ids]))
        partition.per_block[ids] = AWAY
        return hot

    def _make_cold(self, partition: Partition) -> None:
        """Return state and update counts of the hot blocks to the arena."""
        self._write_back(partition)
        partition.per_block.copy_(self._all_updates(partition))
        self._forget_hot(self.states[partition.index])

    def _forget_hot(self, state: SelectionState) -> None:
        """Free the state of the hot blocks. Its copies are complete: all ranks have waited since
        their launch."""
        state.hot = None
        if state.pages is not None:
            self._link.page_locks.unlock([state.pages])
            state.pages = None

    @torch.no_grad()
    def _write_back(self, partition: Partition) -> None:
        """Copy p, m, v of the hot blocks to the arena, where the worker skips them."""
        if (hot := self.states[partition.index].hot) is not None:
            for array, rows in zip(partition.state, (hot.p, hot.m, hot.v), strict=True):
                hot.blocks.put(array, rows)

    def _all_updates(self, partition: Partition) -> torch.Tensor:
        """Update counts of all blocks, including hot ones; 1-D int32 [blocks], host."""
        updates, hot = partition.per_block.clone(), self.states[partition.index].hot
        if hot is not None:
            updates[hot.blocks.ids.cpu()] = hot.updates.cpu()
        return updates

    def _mean_scores(self) -> tuple[float, float]:
        """Mean score of the hot and of the cold blocks at the first selection."""
        hot = sum(len(state.hot.blocks) for state in self.states if state.hot is not None)
        cold = sum(partition.per_block.numel() for partition in self._partitions) - hot
        return self._hot_sum / max(1, hot), self._cold_sum / max(1, cold)

    # -- state -------------------------------------------------------------------------------------

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        hot = self.states[partition.index].hot
        return [] if hot is None else [hot.p, hot.m, hot.v, hot.updates, hot.blocks.ids]

    def write_back(self) -> None:
        for partition in self._partitions:
            self._write_back(partition)

    @torch.no_grad()
    def resume(self) -> None:
        for partition, state in zip(self._partitions, self.states, strict=True):
            if (hot := state.hot) is not None:
                for array, rows in zip(partition.state, (hot.p, hot.m, hot.v), strict=True):
                    rows.copy_(hot.blocks.take(array))
        if self.schedule.state.steps_in_flight is not None:
            unused = [self._kind.step(partition.group, 1, 1.0) for partition in self._partitions]
            tasks = [
                MeanPartitionPass(i, (), (), step, again=self.schedule.handed_over)
                for i, step in enumerate(unused)
            ]
            self._link.depart(tasks, gradients=0, publishes=self.schedule.plan().waits_first)

    def restart(
        self,
        counts: Sequence[int] | None,
        partitions: Sequence[Partition] | None = None,
    ) -> None:
        super().restart(counts, partitions)
        for partition, state in zip(self._partitions, self.states, strict=True):
            if counts is None:
                partition.per_block.copy_(self._all_updates(partition))
            else:
                partition.per_block.fill_(counts[partition.index])
            self._forget_hot(state)

    def recounted(self, partition: Partition, updates: int) -> None:
        partition.per_block[partition.per_block != AWAY] = updates
        if (hot := self.states[partition.index].hot) is not None:
            hot.updates.fill_(updates)

    def saved(self) -> list[dict[str, Any]]:
        return [
            {
                "block_updates": self._all_updates(partition),
                "hot_blocks": None if state.hot is None else state.hot.blocks.ids,
            }
            for partition, state in zip(self._partitions, self.states, strict=True)
        ]

    def changed_setting(self, schedule: Mapping[str, Any], position: int) -> str | None:
        there, in_flight = schedule["interval"], schedule["steps_in_flight"]
        if not self._interval_fits(self._settings, there):
            return f"zenflow.update_interval ({there} in the checkpoint)"
        fits = in_flight is None or (
            self._settings.lag is not None and in_flight < self._settings.lag
        )
        return None if fits else "zenflow.overlap_step or overlap_lag"

    def restore(self, partitions: Sequence[SelectivePartitionValues]) -> None:
        for partition, state, saved in zip(self._partitions, self.states, partitions, strict=True):
            partition.per_block.copy_(saved.block_updates)
            if saved.hot_blocks is not None:
                blocks = BlockSet(
                    saved.hot_blocks.to(partition.device), partition.master.numel(), self.block_size
                )
                state.hot = self._taken_away(partition, blocks)
