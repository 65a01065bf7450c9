"""Starts a rank's optimizer process and builds `HostOptimizer` around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from deepspeed_ext.cores.worker_placement import WorkerPlacement, unbound_threads
from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.backend import get_accelerator, local_world_size
from deepspeed_ext.runtime.ranks import RankGroup, agreed, require_same_plan, together, within
from deepspeed_ext.zenflow.agreement import agreed_plan, facts_of_all, without_landing
from deepspeed_ext.zenflow.kernels import launch, prepare
from deepspeed_ext.zenflow.optimizers.choose import kind_of
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.advice import Cores, remedies_of
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import Kernel, ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive.rule import PredictiveRule
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.adviser import Adviser
from deepspeed_ext.zenflow.step.coded_moments import CodedMoments
from deepspeed_ext.zenflow.step.link import WorkerLink, WorkerThreads
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.optimizer_state import OptimizerState
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.transfers.beside_step import LandingBuffer, allocated_on_all_ranks
from deepspeed_ext.zenflow.transfers.inside_step import Results
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["ZenFlowStart", "start_optimizer"]


@dataclass(frozen=True)
class ZenFlowStart:
    """What an engine gives to its ZenFlow optimizer.

    Attributes:
        run: the ``zenflow`` section of this run.
        ranks: the ranks that the model is spread over. They agree on every choice that changes
            weights, and an error of one is raised on all.
        placement: the worker's cores and memory node from the core plan; None: unbound.
        undo: receives what stops the worker and frees the arena, in case the engine's constructor fails later.
        cores: this rank's cores in the core plan, PyTorch's among them; None: unbound.
    """

    run: ZenFlowRun
    ranks: RankGroup
    placement: WorkerPlacement | None
    undo: ExitStack
    cores: int | None = None


def start_optimizer(
    start: ZenFlowStart,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    caller: Caller,
    sharers: RankGroup,
    holders: Sequence[RankGroup],
) -> HostOptimizer:
    """Make this rank's plan, and build exactly that. A collective.

    Args:
        optimizer: the user's Adam, AdamW or Lion.
        groups: index of the parameter group of each partition.
        weights: returns a partition's weights, 1-D, in the model's dtype: the initial values of p. They are written in
            place.
        caller: what the caller does with weights and gradients. The result's ``decided`` says what it must do.
        sharers: the data-parallel ranks, whose partitions are in the same order.
        holders: for each partition, the ranks among which its parameters are divided.

    Raises:
        ConfigError: settings contradict each other, or the optimizer is another.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena, or the accelerator its share.
        WorkerError: the worker does not start, or another rank has raised one of these errors.
    """
    ranks, parts = start.ranks, [weights(index) for index in range(len(groups))]
    with together(ranks, otherwise=None):
        kind = kind_of(optimizer, start.run.config)
    facts = facts_of_all(parts, caller, type(kind).layout, ranks)
    with within(ranks, sharers):  # stages of a pipeline may have different groups
        require_same_plan("ZenFlow's partitions", list(groups), sharers)
    plan = agreed_plan(facts, start.run, ranks)
    _prepare_kernels(plan, kind, parts, warns=ranks.rank == 0)
    buffers = _landing_buffers(plan, ranks)
    if buffers is None:
        _require_open(start.run, plan, ranks)
        plan, buffers = without_landing(facts, start.run, ranks), []
    if plan.shortage is not None:
        raise agreed(OutOfMemoryError(plan.shortage), ranks)
    threads = _threads(start)
    metrics = Metrics(adviser=_adviser(start, plan, threads))
    link = WorkerLink(plan, buffers, threads, ranks, metrics)
    start.undo.callback(link.abandon)
    share = None
    if plan.has_share:
        share = AcceleratorShare.on_all_ranks(plan, parts, link.arena, kind, ranks)
    layout = plan.rule.layout
    states = [_state(layout, i, group, link.arena, partial(weights, i)) for i, group in enumerate(groups)]
    partitions = [_partition(plan, i, state, holders[i], link.arena) for i, state in enumerate(states)]
    for partition, part, decided in zip(partitions, parts, plan.partitions, strict=True):
        _copy_to_host(part[decided.head :], partition.master)
    rule: UpdateRule[Any]
    if isinstance(plan.rule, SelectiveSettings):
        rule = SelectiveRule(plan, partitions, link, ranks, kind, metrics)
    else:
        rule = PredictiveRule(plan, partitions, link, ranks, kind, metrics)
    coded = CodedMoments(link.arena, partitions, layout, plan.rule.block_size) if layout.is_coded else None
    state_here = OptimizerState(partitions, states, share, coded)
    return HostOptimizer(plan, rule, state_here, link, kind, ranks)


def _threads(start: ZenFlowStart) -> WorkerThreads:
    """The worker's threads."""
    placement, reserved = start.placement, start.run.config.reserved_cores
    if placement is None:
        on_cpu = get_accelerator().is_synchronized_device()
        count = unbound_threads(reserved, local_world_size(), on_cpu=on_cpu)
    else:
        count = placement.threads
    return WorkerThreads(placement, count, start.run.worker_timeout_seconds)


def _adviser(start: ZenFlowStart, plan: ZenFlowPlan, threads: WorkerThreads) -> Adviser | None:
    """Who judges steps; None: they hide nothing, because they wait for their own update."""
    if not plan.rule.overlapped:
        return None
    cores = None if start.cores is None else Cores(threads.count, start.cores)
    leads, room = start.ranks.rank == 0, memory.unused_accelerator_bytes
    return Adviser(remedies_of(plan), cores, leads=leads, room=room)


def _landing_buffers(plan: ZenFlowPlan, ranks: RankGroup) -> list[LandingBuffer] | None:
    """The buffers of the plan; None on every rank if a rank has no memory for them. A collective if it has any."""
    if plan.copies is not Copies.BESIDE_STEP:
        return []
    kinds, like = plan.kinds, partial(torch.empty, device="meta")
    described = []
    for each in plan.partitions:
        blocks, width = -(-each.on_host // kinds.block_size), plan.rule.per_block_width
        size = (blocks,) if width == 1 else (blocks, width)
        dtype = getattr(torch, kinds.per_block.dtype)
        means = like(size, dtype=dtype) if kinds.per_block.exchanged else None
        published = like(each.on_host, dtype=getattr(torch, plan.dtypes.published))
        described.append(Results(published, means))
    return allocated_on_all_ranks(described, getattr(torch, plan.dtypes.gradient), ranks)


def _require_open(run: ZenFlowRun, plan: ZenFlowPlan, ranks: RankGroup) -> None:
    """Raise on every rank if the config asks for landing buffers, which a rank could not allocate."""
    if run.config.hide_transfers:
        raise agreed(
            OutOfMemoryError(
                "zenflow.hide_transfers is true, but a rank cannot allocate the landing buffers, which take "
                f"{plan.landing_bytes:,} bytes of device memory on rank {ranks.rank}. Leave the field out, and the "
                "copies run inside of the step"
            ),
            ranks,
        )


def _copy_to_host(weights: torch.Tensor, master: torch.Tensor) -> None:
    """Make p (1-D fp32 [n], host) from weights of any dtype, without an fp32 copy of all of them on the accelerator."""
    if weights.device == master.device:
        master.copy_(weights)
    else:
        Staging(weights.dtype).to_host(weights, master)


def _prepare_kernels(
    plan: ZenFlowPlan,
    kind: OptimizerKind,
    weights: Sequence[torch.Tensor],
    *,
    warns: bool,
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it.

    A partition's gradient and results are at least as aligned as its weights: they have arrays of their own, or lie
    in one as the weights do.
    """
    device, block_size, names = weights[0].device, plan.rule.block_size, plan.dtypes
    dtypes = (getattr(torch, name) for name in (names.weights, names.published, names.gradient))
    of_weights, published, gradient = dtypes
    alignments = {launch.is_aligned(block_size, [part]) for part in weights}
    calls: list[Iterable[Callable[[], object]]] = []
    if Kernel.NORM in plan.kernels:
        calls.append(prepare.norms(device, {of_weights, gradient}))
    if Kernel.STEP in plan.kernels:
        steps = alignments if plan.has_share else {True}
        calls.append(kind.step_kernels(device, block_size, gradient, steps))
    if Kernel.ESTIMATE in plan.kernels and isinstance(plan.rule, PredictiveSettings):
        estimated = of_weights, published, gradient
        calls.append(kind.estimate_kernels(device, block_size, *estimated, plan.rule.with_drift, alignments))
    prepare.prepare(device, block_size, chain(*calls), warns=warns)


def _state(
    layout: StateLayout, index: int, group: int, arena: Arena, weights: Callable[[], torch.Tensor]
) -> WholeState:
    p, *moments = (arena.whole(each, index) for each in ("p", *layout.shown))
    return WholeState(group, weights, p.requires_grad_(), dict(zip(layout.names, moments, strict=True)))


def _partition(plan: ZenFlowPlan, index: int, state: WholeState, holders: RankGroup, arena: Arena) -> Partition:
    """What remains of a partition behind its head, for the rule."""
    layout, decided = plan.rule.layout, plan.partitions[index]
    head = decided.head
    return Partition(
        index,
        state.group,
        holders,
        (lambda: state.weights()[head:]) if head else state.weights,
        master=arena.tensor("p", index),
        moments=tuple(arena.tensor(kind, index) for kind, _ in layout.moments),
        scales=tuple(arena.tensor(kind, index) for kind in layout.scales),
        publish_dtype=getattr(torch, plan.dtypes.published),
        grad_dtype=getattr(torch, plan.dtypes.gradient),
        per_block=arena.tensor(plan.kinds.per_block.kind, index),
        ring=[arena.tensor(*key) for key in arena.keys("g", index)],
        places=decided.places,
    )
