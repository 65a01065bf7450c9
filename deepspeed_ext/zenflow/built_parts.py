"""Builds what depends on the share that steps on the accelerator: kernels, and the rule's view of a
partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from deepspeed_ext.zenflow.kernels import launch, prepare
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.plan import Kernel, ZenFlowPlan
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.worker.arena import Arena

__all__ = ["partition_of", "prepare_kernels"]


def prepare_kernels(
    plan: ZenFlowPlan, kind: OptimizerKind, weights: Sequence[torch.Tensor], *, warns: bool
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it.

    A partition's gradient and results are at least as aligned as its weights.
    """
    device, block_size, names = weights[0].device, plan.rule.block_size, plan.dtypes
    dtypes = (getattr(torch, name) for name in (names.weights, names.published, names.gradient))
    of_weights, published, gradient = dtypes
    alignments = {launch.is_aligned(block_size, [part]) for part in weights}
    calls: list[Iterable[Callable[[], object]]] = []
    if Kernel.NORM in plan.kernels:
        calls.append(prepare.norms(device, {of_weights, gradient}))
    if Kernel.STEP in plan.kernels:
        stepped = gradient, of_weights
        calls.append(kind.step_kernels(device, block_size, stepped, alignments))
    if Kernel.ESTIMATE in plan.kernels:
        estimated = of_weights, published, gradient
        calls.append(kind.estimate_kernels(device, block_size, estimated, alignments))
    prepare.prepare(device, block_size, chain(*calls), warns=warns)


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
