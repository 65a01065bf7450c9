"""What a plan becomes: the classes of its update rule and, as far as they depend on the share that
steps on the accelerator, kernels and the rule's view of a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import PredictiveSettings, RuleSettings, SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive import PredictiveRule, PredictiveState
from deepspeed_ext.zenflow.rules.saved import (
    PartitionValues,
    PredictivePartitionValues,
    SelectivePartitionValues,
)
from deepspeed_ext.zenflow.rules.selective import SelectiveRule, SelectiveState
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.step.schedule import State
from deepspeed_ext.zenflow.worker.arena import Arena

__all__ = ["RULES", "SAVED", "partition_of", "prepare_kernels"]

RULES: Mapping[type[RuleSettings], type[SelectiveRule] | type[PredictiveRule]] = {
    PredictiveSettings: PredictiveRule,
    SelectiveSettings: SelectiveRule,
}
"""The class of an update rule, by that of its settings."""

SAVED: Mapping[str, tuple[type[State], type[PartitionValues]]] = {
    PredictiveRule.name: (PredictiveState, PredictivePartitionValues),
    SelectiveRule.name: (SelectiveState, SelectivePartitionValues),
}
"""What a checkpoint holds by rule: the state of the schedule, and of each partition."""

_REHEARSED_NUMEL = 1 << 16
"""Elements of the arrays on which kernels are compiled."""


def prepare_kernels(
    plan: ZenFlowPlan, kind: OptimizerKind, weights: Sequence[torch.Tensor], *, warns: bool
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it.

    A partition's gradient and results are at least as aligned as its weights.
    """
    device, block_size, layout = weights[0].device, plan.rule.block_size, kind.layout
    names, step = plan.dtypes, kind.step(0, 1, 1.0)
    of_weights, published, gradient = (
        getattr(torch, name) for name in (names.weights, names.published, names.gradient)
    )
    blocks = max(1, _REHEARSED_NUMEL // block_size)

    def zeros(dtype: torch.dtype, first: int = 0, numel: int = blocks * block_size) -> torch.Tensor:
        return torch.zeros(first + numel, dtype=dtype, device=device)[first:]

    def estimate(first: int) -> None:
        w, y, g = (zeros(dtype, first) for dtype in (of_weights, published, gradient))
        width, dtype = layout.per_block_width(block_size), getattr(torch, layout.per_block[1])
        known = kind.estimate(step, zeros(dtype, 0, blocks * width), block_size)
        kind.predict(known, w, y, g, step)

    def step_rows(first: int) -> None:
        state = [zeros(getattr(torch, dtype)).view(blocks, -1) for _, dtype in layout.arrays]
        state += [zeros(torch.uint8, 0, blocks) for _ in layout.scales]
        g, w = (zeros(dtype, first).view(blocks, -1) for dtype in (gradient, of_weights))
        kind.step_rows(state, g, w, step)

    firsts = {0 if launch.is_aligned(block_size, [part]) else 1 for part in weights}
    calls: list[Callable[[], None]] = []
    if plan.has_heads or (plan.computes_there and plan.rule.steps_beside_worker):
        calls += [partial(step_rows, first) for first in firsts]
    if plan.computes_there and plan.rule.estimates:
        calls += [partial(estimate, first) for first in firsts]
    launch.prepare(device, block_size, calls, warns=warns)


def partition_of(plan: ZenFlowPlan, index: int, state: WholeState, arena: Arena) -> Partition:
    """A partition as the rule sees it: without its head, which steps on the accelerator."""
    layout, head = plan.rule.layout, plan.partitions[index].head
    return Partition(
        index,
        state.group,
        (lambda: state.weights()[head:]) if head else state.weights,
        master=arena.tensor("p", index),
        moments=tuple(arena.tensor(kind, index) for kind, _ in layout.moments),
        scales=tuple(arena.tensor(kind, index) for kind in layout.scales),
        publish_dtype=getattr(torch, plan.dtypes.published),
        grad_dtype=getattr(torch, plan.dtypes.gradient),
        ring=[arena.tensor(*key) for key in arena.keys("g", index)],
        places=plan.places,
    )
