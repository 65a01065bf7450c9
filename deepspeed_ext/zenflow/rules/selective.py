"""Implements the selective rule, ZenFlow as published: hot blocks step on the accelerator at every
step, cold blocks once per interval on the host.

A partition of n elements is divided into blocks of `block_size` contiguous elements; a short last
one is always cold. Hot blocks are those with the largest gradients in their partition. Their p, m,
v (fp32) live outside the arena, whose copies of them are stale until `write_back`; they move there
and back at each selection. Once per interval the worker makes one exact Adam step of all blocks
with the mean of the clipped gradients; then the hot blocks' weights are written over its results.

Note: [two counts]
Hot blocks have had an update in each step, cold blocks one in each interval, so their bias
corrections differ. A block that changes sides keeps its corrected moments m / (1 - beta1^t) and
v / (1 - beta2^t): its moments are multiplied by what the correction changes by.

Source: ZenFlow (Lan et al., 2025, arXiv 2505.12242). DeepSpeed's implementation selects columns
instead of blocks.

Its schedule is a state machine over plain values.

During warm-up every step is an exact step of all blocks. After it, hot blocks step on the
accelerator at every step, and gradients are collected. At the end of an interval their mean is
handed over, and the worker makes one step of the cold blocks with it. Its result is applied at once
(no overlap) or in the next step. A step that selects hot blocks again waits for everything.

Example with one warm-up step, interval 3, overlapped, and a selection every 6 steps; ``>`` hands
over, ``<`` applies::

    step        1      2    3    4    5    6    7     8    9    10
    blocks      all    hot  hot  hot  hot  hot  hot   hot  hot  hot
    worker      > <              >    <         > <             >
    selection   *                               *
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import SelectiveSettings
from deepspeed_ext.zenflow.rules.saved import FLOATS, AdamState, PartitionValues, Tensors
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.rule import Partition, Schedule, StepPlan, UpdateRule
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import as_array, chunk_numel, step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel, library_path
from deepspeed_ext.zenflow.worker.kernel.passes import Pass, StateLayout
from deepspeed_ext.zenflow.worker.messages import WorkerTask


@dataclass(frozen=True, kw_only=True)
class SelectivePlan(StepPlan):
    """If the step waits first, it applies the result of an earlier hand-over; if it waits last,
    that of its own.

    Attributes:
        collected: gradients of the interval before this step's.
        selects: whether hot blocks are selected again, from this step's gradient.
    """

    collected: int = 0
    selects: bool


@dataclass(frozen=True)
class SelectiveState:
    """The position in the schedule; see `Schedule.state`."""

    steps: int = 0
    written: int = 0
    collected: int = 0
    """Gradients of the interval so far."""
    is_in_flight: bool = False
    """Whether a result is not applied yet."""
    since_selection: int = 0
    """Optimizer steps since the hot blocks were chosen."""


class SelectiveSchedule(Schedule):
    """See `Schedule`. Settings may change between steps.

    Args:
        source: where gradients come from.
    """

    def __init__(self, settings: SelectiveSettings, source: Source) -> None:
        self.state = SelectiveState()
        self.ring = settings.slots(source)
        self._settings = settings

    @property
    def warm_up_steps(self) -> int:
        assert self._settings.warm_up_steps is not None
        return self._settings.warm_up_steps

    def plan(self) -> SelectivePlan:
        state, settings = self.state, self._settings
        if state.steps < self.warm_up_steps and not state.collected:
            selects = state.steps + 1 == self.warm_up_steps
            return SelectivePlan(wait=Wait.STEP, waits_first=False, selects=selects)
        last, every = state.collected + 1 >= settings.interval, settings.select_every_steps
        selects = last and 0 < every <= state.since_selection + 1
        waits = last and (selects or not settings.overlapped)
        return SelectivePlan(
            wait=Wait.STEP if waits else Wait.NEXT_STEP,
            handed_over=int(last),
            waits_first=state.is_in_flight,
            collected=state.collected,
            selects=selects,
        )

    def advance(self, plan: SelectivePlan) -> None:
        state = self.state
        self.state = replace(
            state,
            steps=state.steps + 1,
            written=state.written + plan.handed_over,
            collected=0 if plan.handed_over else state.collected + 1,
            is_in_flight=bool(plan.handed_over) and not plan.waits_last,
            since_selection=0 if plan.selects else state.since_selection + 1,
        )


def rows_of(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """View the whole blocks of a flat tensor, 1-D [n], as rows."""
    return flat[: flat.numel() // block_size * block_size].view(-1, block_size)


def scores(rows: torch.Tensor) -> torch.Tensor:
    """Sums of the magnitudes of rows [k, block_size], fp32 [k]."""
    if rows.device.type != "cpu":
        return torch.linalg.vector_norm(rows, ord=1, dim=1, dtype=torch.float32)
    # on the CPU, norms of short rows take ten times as long
    parts = rows.split(chunk_numel(rows.device, rows.shape[1]) // rows.shape[1])
    return torch.cat([part.abs().sum(dim=1, dtype=torch.float32) for part in parts])


def recorrect(m: torch.Tensor, v: torch.Tensor, before: AdamStep, after: AdamStep) -> None:
    """Change moments of any shape in place, so that their bias-corrected values after the step
    `after` are those after `before`."""
    if before.step and before.step != after.step:
        m.mul_(after.bias_correction1 / before.bias_correction1)
        v.mul_((after.bias_correction2_sqrt / before.bias_correction2_sqrt) ** 2)


@dataclass(frozen=True, kw_only=True)
class SelectivePartitionValues(PartitionValues):
    """See `SelectionState`."""

    hot_blocks: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    last: AdamStep | None = None
    cold_updates: int

    def tensors(self, layout: StateLayout, block_size: int) -> Tensors:
        if self.mean is not None:
            yield "mean", self.mean, self.on_host, FLOATS
        if (hot := self.hot_blocks) is not None:
            most = min(hot.numel(), self.on_host // block_size)
            yield "hot_blocks", hot, most, (torch.int64,)

    @property
    def is_behind(self) -> bool:
        return self.last is not None

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int, layout: StateLayout
    ) -> None:
        """Step the cold blocks with the mean of the collected gradients, and let all blocks have
        the hot ones' count."""
        assert self.last is not None, "it is behind"
        p, m, v = state
        first = begin // block_size
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        hot = none if self.hot_blocks is None else self.hot_blocks
        ids = hot[(hot >= first) & (hot < first + p.numel() // block_size)] - first
        kept = [rows_of(array, block_size)[ids] for array in state]
        cold = replace(self.last, step=self.cold_updates)
        if self.mean is not None:
            cold = replace(cold, step=self.cold_updates + 1)
            mean = self.mean[begin : begin + p.numel()]
            step_in_fp32(layout, state, mean, cold, block_size, begin)
        recorrect(m, v, cold, self.last)
        for array, rows in zip(state, kept, strict=True):
            rows_of(array, block_size)[ids] = rows


@dataclass
class HotBlocks:
    """The hot blocks of one partition, where the gradients are.

    Attributes:
        ids: their numbers, 1-D int64 [k], ascending.
        state: p, m and v, fp32 [3, k, block_size].
    """

    ids: torch.Tensor
    state: torch.Tensor


@dataclass
class SelectionState:
    """State of the rule for one partition of n elements.

    Attributes:
        hot: None before the first selection.
        mean: mean of the interval's gradients so far, 1-D [n], in the dtype and place of gradients
            and in units of `last`; None before the first.
        last: the newest step, whose number hot blocks count, with the mean's factor; None: no step.
        cold_updates: updates of the cold blocks.
        scores: during a step that selects, the score of each block, 1-D fp32 [n // block_size].
    """

    hot: HotBlocks | None = None
    mean: torch.Tensor | None = None
    last: Any = None
    cold_updates: int = 0
    scores: torch.Tensor | None = None


class SelectiveRule(UpdateRule):
    """Steps hot blocks on the accelerator, and cold blocks once per interval on the host.

    Attributes:
        states: state of each partition, in order.
    """

    position, values = SelectiveState, SelectivePartitionValues
    schedule: SelectiveSchedule

    def __init__(
        self,
        plan: ZenFlowPlan,
        partitions: Sequence[Partition],
        link: WorkerLink,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> None:
        settings = plan.rule
        assert isinstance(settings, SelectiveSettings)
        super().__init__(plan, SelectiveSchedule(settings, plan.source), partitions, link, kind)
        self.states = [SelectionState() for _ in partitions]
        self._settings = settings
        # only where the CPU is the accelerator: beside a GPU, the host has to give the GPU's bits
        library = library_path() if get_accelerator().device_name() == "cpu" else None
        self._host = None if library is None else NativeKernel(library, torch.get_num_threads())

    # -- one optimizer step ------------------------------------------------------------------------

    @torch.no_grad()
    def to_hand_over(
        self, plan: SelectivePlan, partition: Partition, grad: torch.Tensor, step: AdamStep
    ) -> torch.Tensor | None:
        """Step the hot blocks, and add the gradient to the interval's mean."""
        state, before = self.states[partition.index], self.states[partition.index].last
        state.last = step
        rows = rows_of(grad, self.block_size)
        if (hot := state.hot) is not None:
            gradient = rows.index_select(0, hot.ids)
            rounded = torch.empty_like(gradient, dtype=partition.weights().dtype)  # not read
            if self._host is not None:
                p, m, v, g, y = map(as_array, (*hot.state.unbind(0), gradient, rounded))
                work = Pass(self._kind.layout, (p, m, v), y, self.block_size, g)
                self._host.run(work, self._kind.exact(step), step)
            else:
                self._kind.step_rows(hot.state.unbind(0), gradient, rounded, step)
        if plan.selects:
            state.scores = scores(rows)
        if plan.handed_over and not plan.collected:
            return grad
        if not plan.collected:
            state.mean = grad.clone() if state.mean is None else state.mean.copy_(grad)
            return None
        assert state.mean is not None, "of the gradients before"
        # A mean of both cannot overflow. A factor is 0 where the norm was infinite.
        known = plan.collected * before.grad_scale
        if known * step.grad_scale < 0.0:  # `maximize` has changed
            state.mean, known = state.mean.neg_(), -known
        total = known + step.grad_scale
        state.mean.lerp_(grad, step.grad_scale / total if total else 1.0)
        state.last = replace(step, grad_scale=total / (plan.collected + 1))
        return state.mean if plan.handed_over else None

    def step_partition(
        self, plan: SelectivePlan, partition: Partition, grad: torch.Tensor, step: AdamStep
    ) -> None:
        if plan.waits_first:
            for _, y, weights in self._link.stream.parts(partition.index):
                weights.copy_(y, non_blocking=True)
                self._metrics.bytes_up += y.nbytes

    def task(self, plan: SelectivePlan, partition: Partition) -> WorkerTask:
        state = self.states[partition.index]
        state.cold_updates += 1
        step = replace(state.last, step=state.cold_updates)
        return WorkerTask(partition.index, self.schedule.coming, self._kind.exact(step), step)

    @torch.no_grad()
    def write_weights(self, plan: SelectivePlan) -> None:
        """Write the weights of hot blocks over those of the worker's result."""
        with self._link.deferring_errors():
            for partition, state in zip(self._partitions, self.states, strict=True):
                if state.hot is not None:
                    self._put(partition.weights(), state.hot.ids, state.hot.state[0])
                if plan.selects and not self._link.failed:
                    self._select(partition, state)

    # -- selection ---------------------------------------------------------------------------------

    def _select(self, partition: Partition, state: SelectionState) -> None:
        """Choose hot blocks by their scores. Nothing is in flight."""
        assert state.scores is not None, "scored in this step"
        self._make_cold(partition, state)
        count = math.ceil(self._settings.topk_ratio * state.scores.numel())
        ids = torch.topk(state.scores, count, sorted=False).indices.sort().values
        hot = self._copied(partition, ids)
        cold = replace(state.last, step=state.cold_updates)
        recorrect(hot.state[1], hot.state[2], cold, state.last)
        state.hot, state.scores = hot, None

    def _copied(self, partition: Partition, ids: torch.Tensor) -> HotBlocks:
        """The state of blocks `ids`, copied to where gradients are."""
        shape = len(partition.state), len(ids), self.block_size
        state = partition.master.new_empty(shape, device=partition.device)
        for rows, array in zip(state, partition.state, strict=True):  # to need less of the host
            rows.copy_(rows_of(array, self.block_size).index_select(0, ids.cpu()))
        return HotBlocks(ids.to(partition.device), state)

    def _make_cold(self, partition: Partition, state: SelectionState) -> None:
        """Write the hot blocks back as cold ones; see Note: [two counts]."""
        if (hot := state.hot) is not None:
            if state.last is not None:  # some checkpoints of earlier releases have none
                cold = replace(state.last, step=state.cold_updates)
                recorrect(hot.state[1], hot.state[2], state.last, cold)
            self._write_back(partition, state)
        state.hot = None

    def _write_back(self, partition: Partition, state: SelectionState) -> None:
        if state.hot is not None:
            for array, rows in zip(partition.state, state.hot.state, strict=True):
                self._put(array, state.hot.ids, rows)

    def _put(self, flat: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write blocks of a flat tensor, 1-D [n], of any dtype and on any device."""
        rows_of(flat, self.block_size).index_copy_(0, ids.to(flat.device), rows.to(flat))

    # -- state -------------------------------------------------------------------------------------

    def state_beside_weights(self, partition: Partition) -> list[torch.Tensor]:
        state = self.states[partition.index]
        hot = [] if state.hot is None else [state.hot.ids, state.hot.state]
        return [*hot, *([] if state.mean is None else [state.mean])]

    @torch.no_grad()
    def write_back(self) -> None:
        for partition, state in zip(self._partitions, self.states, strict=True):
            self._write_back(partition, state)

    @torch.no_grad()
    def resume(self) -> None:
        for partition, state in zip(self._partitions, self.states, strict=True):
            if state.hot is not None:
                state.hot = self._copied(partition, state.hot.ids)
        if self.schedule.state.is_in_flight:
            slot = self.schedule.handed_over
            unused = (self._kind.step(each.group, 1, 1.0) for each in self._partitions)
            tasks = [WorkerTask(i, slot, self._kind.exact(step)) for i, step in enumerate(unused)]
            self._link.depart(tasks, gradients=0)

    @torch.no_grad()
    def restart(
        self, counts: Sequence[int] | None, partitions: Sequence[Partition] | None = None
    ) -> None:
        assert partitions is None, "no element moves under this rule"
        for partition, state in zip(self._partitions, self.states, strict=True):
            if counts is not None:
                state.hot, state.last, state.cold_updates = None, None, counts[partition.index]
            elif state.hot is not None:
                state.hot = self._copied(partition, state.hot.ids)  # it may have changed there
                self._make_cold(partition, state)

    def recounted(self, partition: Partition, updates: int) -> None:
        state = self.states[partition.index]
        state.cold_updates = updates
        if state.last is not None:
            state.last = replace(state.last, step=updates)

    def saved(self) -> list[dict[str, Any]]:
        collects = self.schedule.state.collected > 0
        return [
            {
                "hot_blocks": None if state.hot is None else state.hot.ids,
                "mean": state.mean if collects else None,
                "last": None if state.last is None else asdict(state.last),
                "cold_updates": state.cold_updates,
            }
            for state in self.states
        ]

    @torch.no_grad()
    def restore(self, partitions: Sequence[SelectivePartitionValues]) -> None:
        for partition, state, saved in zip(self._partitions, self.states, partitions, strict=True):
            state.last = saved.last
            state.cold_updates = saved.cold_updates
            mean, there = saved.mean, (partition.device, partition.grad_dtype)
            state.mean = None if mean is None else mean.to(*there, copy=True)
            if saved.hot_blocks is not None:
                state.hot = self._copied(partition, saved.hot_blocks)
