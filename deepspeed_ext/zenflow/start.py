"""Starts a rank's optimizer process and builds `OffloadedAdam` around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from deepspeed_ext.cores.worker_placement import WorkerPlacement, unbound_threads
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import local_world_size
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, within
from deepspeed_ext.zenflow.gradients_place import GradientBytes, gradients_go_to_host
from deepspeed_ext.zenflow.kernels import launch, prepare
from deepspeed_ext.zenflow.optimizers.choose import hosted
from deepspeed_ext.zenflow.optimizers.interface import HostedOptimizer
from deepspeed_ext.zenflow.rules.predictive.rule import PredictiveRule
from deepspeed_ext.zenflow.rules.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.rules.selective.settings import SelectiveSettings
from deepspeed_ext.zenflow.step.accelerator_share import (
    AcceleratorShare,
    ShareFacts,
    bytes_beside_share,
    host_share_that_fits,
)
from deepspeed_ext.zenflow.step.coded_moments import CodedMoments
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.transfers.beside_step import LandingBuffer, allocate_landing_buffers
from deepspeed_ext.zenflow.transfers.inside_step import Results
from deepspeed_ext.zenflow.worker.arena import Arena, ArraySpec, bytes_at_start
from deepspeed_ext.zenflow.worker.sizes import (
    accelerator_numel,
    accelerator_share_bytes,
    arena_specs,
    chunk_slots,
    dtype_name,
    slot_specs,
)

__all__ = ["ZenFlowStart", "start_adam"]


@dataclass(frozen=True)
class ZenFlowStart:
    """What an engine gives to its ZenFlow optimizer.

    Attributes:
        run: the ``zenflow`` section of this run.
        ranks: the ranks that the model is spread over. They agree on every choice that changes
            weights, and an error of one is raised on all.
        placement: the worker's cores and memory node from the core plan; None: unbound.
        undo: receives what stops the worker and frees the arena, in case the engine's constructor fails later.
    """

    run: ZenFlowRun
    ranks: RankGroup
    placement: WorkerPlacement | None
    undo: ExitStack


def start_adam(
    start: ZenFlowStart,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    *,
    grad_dtype: torch.dtype,
    sharers: RankGroup,
    holders: Sequence[RankGroup],
    weights_on_host: bool = False,
    gradients: GradientBytes | None = None,
) -> OffloadedAdam:
    """Start this rank's worker. A collective of `start.ranks`.

    Args:
        optimizer: the user's Adam, AdamW or Lion.
        groups: index of the parameter group of each partition.
        weights: returns a partition's weights, 1-D, in the model's dtype: the initial values of p. They are written in
            place.
        grad_dtype: dtype in which gradients are handed over.
        sharers: the data-parallel ranks, whose partitions are in the same order.
        holders: for each partition, the ranks among which its parameters are divided.
        weights_on_host: whether `weights` are on the host.
        gradients: what they take, and whether they may go to the host during backward; None: nothing,
            and they may not. The result's ``link.fills_early`` says whether they go there.

    Raises:
        ConfigError: settings contradict each other, or the optimizer is another.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena, or the accelerator its share.
        WorkerError: the worker does not start, or another rank has raised one of these errors.
    """
    gradients = gradients or GradientBytes(0, 0, may_leave=False)
    run, config, placement, ranks = start.run, start.run.config, start.placement, start.ranks
    parts = [weights(index) for index in range(len(groups))]
    _agree(run, groups, (weights_on_host, gradients.may_leave), ranks, sharers)
    kind, metrics = hosted(optimizer, config), Metrics()
    dtypes = _Dtypes(config.publish_dtype or dtype_name(parts[0].dtype), grad_dtype)
    numels = [part.numel() for part in parts]
    settings = _settings(run, kind, parts, dtypes, weights_on_host, gradients, ranks)
    heads = _heads(run, parts, settings, dtypes, gradients, ranks)
    _prepare_kernels(kind, settings, parts, dtypes, any(heads), warns=ranks.rank == 0)
    shape = _Shape(settings, numels, heads, dtypes)
    buffers = _landing_buffers(run, shape, gradients, ranks)
    threads = unbound_threads(config.reserved_cores, local_world_size()) if placement is None else placement.threads
    link = WorkerLink(
        _specs(shape, hides_transfers=buffers is not None),
        buffers,
        block_size=settings.block_size,
        placement=placement,
        threads=threads,
        weights_on_host=weights_on_host,
        fills_early=settings.fills_early,
        ranks=ranks,
        timeout_seconds=run.worker_timeout_seconds,
        metrics=metrics,
    )
    start.undo.callback(link.abandon)
    share = None
    if any(heads):
        share = AcceleratorShare.on_all_ranks(parts, heads, link.arena, settings.block_size, kind, ranks)
    states = [_state(kind, i, group, link.arena, partial(weights, i)) for i, group in enumerate(groups)]
    partitions = [_partition(i, state, holders[i], shape, link.arena) for i, state in enumerate(states)]
    for partition, part, head in zip(partitions, parts, heads, strict=True):
        _copy_to_host(part[head:], partition.master)
    of_rule = partitions, link, ranks, kind, metrics
    rule: UpdateRule[Any]
    if isinstance(settings, SelectiveSettings):
        rule = SelectiveRule(settings, *of_rule)
    else:
        rule = PredictiveRule(settings, *of_rule)
    coded = CodedMoments(link.arena, partitions, kind.layout, settings.block_size) if kind.layout.is_coded else None
    return OffloadedAdam(rule, partitions, states, share, coded, link, optimizer, kind, ranks, metrics)


@dataclass(frozen=True)
class _Dtypes:
    """Dtypes of y and of the gradients that are handed over."""

    published: str
    gradient: torch.dtype

    @property
    def names(self) -> tuple[str, str]:
        """Both by name."""
        return self.published, dtype_name(self.gradient)


@dataclass(frozen=True)
class _Shape:
    """What the arena and the landing buffers are made for.

    Attributes:
        numels: elements of each partition.
        heads: how many of them, at its start, step on the accelerator.
    """

    settings: PredictiveSettings | SelectiveSettings
    numels: Sequence[int]
    heads: Sequence[int]
    dtypes: _Dtypes

    @property
    def on_host(self) -> list[int]:
        """How many elements of each partition step on the host."""
        return [numel - head for numel, head in zip(self.numels, self.heads, strict=True)]


def _agree(
    run: ZenFlowRun,
    groups: Sequence[int],
    places: tuple[bool, bool],
    ranks: RankGroup,
    sharers: RankGroup,
) -> None:
    """Raise on every rank if settings differ between ranks."""
    fields = run.config.model_dump(exclude={"pt_reserved_cores", "pt_reserved_cores_perc"})
    epoch = run.steps_per_epoch if run.config.select_strategy == "epoch" else None  # ranks may load different data
    require_same_plan("ZenFlow", (fields, epoch, run.host_share, *places), ranks)
    with within(ranks, sharers):  # stages of a pipeline may have different groups
        require_same_plan("ZenFlow's partitions", list(groups), sharers)


def _settings(
    run: ZenFlowRun,
    kind: HostedOptimizer,
    parts: Sequence[torch.Tensor],
    dtypes: _Dtypes,
    weights_on_host: bool,
    gradients: GradientBytes,
    ranks: RankGroup,
) -> PredictiveSettings | SelectiveSettings:
    """The rule's settings. A collective if it is measured where gradients go."""
    settings: PredictiveSettings | SelectiveSettings
    if run.config.rule == "selective":
        settings = SelectiveSettings.of(run.config, run.steps_per_epoch)
    else:
        settings = PredictiveSettings.of(run.config, layout=kind.layout)
    on_cpu = parts[0].device.type == "cpu"
    settings = replace(settings, weights_on_host=weights_on_host, fills_early=True, fills_before_y=on_cpu)
    fills_early = weights_on_host
    if gradients.may_leave and not weights_on_host:
        arena = bytes_at_start(arena_specs(settings, [part.numel() for part in parts], *dtypes.names))
        fills_early = gradients_go_to_host(run, gradients.accelerator, arena + gradients.sums, ranks)
    return replace(settings, fills_early=fills_early)


def _landing_buffers(
    run: ZenFlowRun, shape: _Shape, gradients: GradientBytes, ranks: RankGroup
) -> list[LandingBuffer] | None:
    """Buffers of each partition for copies beside the step; None: copies run inside of it. A collective."""
    settings, like = shape.settings, partial(torch.empty, device="meta")
    (kind, dtype, _), width = settings.per_block, settings.per_block_width
    described = []
    for numel in shape.on_host:
        blocks = -(-numel // settings.block_size)
        size = (blocks,) if width == 1 else (blocks, width)
        means = like(size, dtype=getattr(torch, dtype)) if kind in ("block_means", "known") else None
        described.append(Results(like(numel, dtype=getattr(torch, shape.dtypes.published)), means))
    hides = False if settings.fills_early else run.config.hide_transfers
    later = gradients.accelerator + gradients.buckets
    later += sum(accelerator_share_bytes(head, settings.block_size, settings.layout) for head in shape.heads)
    return allocate_landing_buffers(hides, described, shape.dtypes.gradient, ranks, later=later)


def _specs(shape: _Shape, *, hides_transfers: bool) -> list[ArraySpec]:
    """The arrays of the arena."""
    settings, on_host, names = shape.settings, shape.on_host, shape.dtypes.names
    slots = chunk_slots(settings, sum(on_host), max(on_host, default=0), *names) if hides_transfers else None
    specs = arena_specs(settings, shape.numels, *names, shape.heads, in_chunks=slots is not None)
    return [*specs, *([] if slots is None else slot_specs(slots, *names))]


def _copy_to_host(weights: torch.Tensor, master: torch.Tensor) -> None:
    """Make p (1-D fp32 [n], host) from weights of any dtype, without an fp32 copy of all of them on the accelerator."""
    if weights.device == master.device:
        master.copy_(weights)
    else:
        Staging(weights.dtype).to_host(weights, master)


def _heads(
    run: ZenFlowRun,
    parts: Sequence[torch.Tensor],
    settings: PredictiveSettings | SelectiveSettings,
    dtypes: _Dtypes,
    gradients: GradientBytes,
    ranks: RankGroup,
) -> list[int]:
    """How many elements at the start of each partition step on the accelerator. A collective if that is measured."""
    share, block_size, numels = run.host_share, settings.block_size, [part.numel() for part in parts]
    if share is None:
        hides = run.config.hide_transfers is not False and not settings.fills_early
        itemsize = parts[0].element_size()
        beside = partial(bytes_beside_share, settings, *dtypes.names, itemsize, hides)

        def facts() -> ShareFacts:
            free, total = allocation.free_accelerator_bytes(), allocation.total_accelerator_bytes()
            later, reserve = gradients.accelerator + gradients.buckets, run.config.offload_reserve_fraction
            return ShareFacts(numels, block_size, settings.layout, free, total, reserve, later, beside)

        share = host_share_that_fits(facts, ranks)
    return [accelerator_numel(numel, share, block_size) for numel in numels]


def _prepare_kernels(
    kind: HostedOptimizer,
    settings: PredictiveSettings | SelectiveSettings,
    weights: Sequence[torch.Tensor],
    dtypes: _Dtypes,
    has_share: bool,
    *,
    warns: bool,
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it.

    A partition's gradient and results are at least as aligned as its weights: they have arrays of their own, or lie
    in one as the weights do.
    """
    device, dtype, block_size = weights[0].device, weights[0].dtype, settings.block_size
    calls: list[Iterable[Callable[[], object]]] = [prepare.norms(device, {dtype, dtypes.gradient})]
    is_computed_there = not settings.fills_early
    alignments = {launch.is_aligned(block_size, [part]) for part in weights}
    if (isinstance(settings, SelectiveSettings) and is_computed_there) or has_share:
        calls.append(kind.step_kernels(device, block_size, dtypes.gradient, alignments if has_share else {True}))
    if isinstance(settings, PredictiveSettings) and settings.overlapped and is_computed_there:
        estimated = dtype, getattr(torch, dtypes.published), dtypes.gradient
        calls.append(kind.estimate_kernels(device, block_size, *estimated, settings.with_drift, alignments))
    prepare.prepare(device, block_size, chain(*calls), warns=warns)


def _state(
    kind: HostedOptimizer, index: int, group: int, arena: Arena, weights: Callable[[], torch.Tensor]
) -> WholeState:
    p, *moments = (arena.whole(each, index) for each in ("p", *kind.layout.shown))
    return WholeState(group, weights, p.requires_grad_(), dict(zip(kind.layout.names, moments, strict=True)))


def _partition(index: int, state: WholeState, holders: RankGroup, shape: _Shape, arena: Arena) -> Partition:
    """What remains of a partition behind its head, for the rule."""
    settings, head = shape.settings, shape.heads[index]
    per_block, *_ = settings.per_block
    return Partition(
        index,
        state.group,
        holders,
        (lambda: state.weights()[head:]) if head else state.weights,
        master=arena.tensor("p", index),
        moments=tuple(arena.tensor(kind, index) for kind, _ in settings.layout.moments),
        scales=tuple(arena.tensor(kind, index) for kind in settings.layout.scales),
        publish_dtype=getattr(torch, shape.dtypes.published),
        grad_dtype=shape.dtypes.gradient,
        per_block=arena.tensor(per_block, index),
        ring=[arena.tensor(*key) for key in arena.keys("g", index)],
        on_host=settings.fills_early,
    )
