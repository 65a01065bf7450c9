"""Starts a rank's optimizer process and builds `OffloadedAdam` around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from deepspeed_ext.cores.worker_placement import WorkerPlacement, unbound_threads
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan
from deepspeed_ext.zenflow.gradients_place import GradientBytes, gradients_go_to_host
from deepspeed_ext.zenflow.kernels import launch, prepare
from deepspeed_ext.zenflow.optimizers.choose import hosted
from deepspeed_ext.zenflow.optimizers.interface import HostedOptimizer
from deepspeed_ext.zenflow.rules.predictive.rule import PredictiveRule
from deepspeed_ext.zenflow.rules.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.rules.selective.settings import SelectiveSettings
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare, host_share_that_fits
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.transfers.beside_step import allocate_landing_buffers
from deepspeed_ext.zenflow.transfers.inside_step import Results
from deepspeed_ext.zenflow.worker.arena import Arena, bytes_at_start
from deepspeed_ext.zenflow.worker.sizes import (
    RuleSettings,
    accelerator_numel,
    arena_specs,
    chunk_slots,
    dtype_name,
    slot_specs,
)

__all__ = ["start_adam"]


def start_adam(
    run: ZenFlowRun,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    *,
    grad_dtype: torch.dtype,
    ranks: RankGroup,
    holders: Sequence[RankGroup],
    placement: WorkerPlacement | None,
    local_ranks: int,
    undo: ExitStack,
    weights_on_host: bool = False,
    gradients: GradientBytes | None = None,
) -> OffloadedAdam:
    """Start this rank's worker. A collective.

    Args:
        run: the settings of this run.
        optimizer: the user's Adam, AdamW or Lion.
        groups: index of the parameter group of each partition.
        weights: returns a partition's weights, 1-D, in the model's dtype: the initial values of p. They are written in
            place.
        grad_dtype: dtype in which gradients are handed over.
        ranks: the data-parallel ranks; all of them call this, with partitions in the same order.
        holders: for each partition, the ranks among which its parameters are divided.
        placement: the worker's cores and memory node from the core plan; None: unbound.
        local_ranks: number of ranks on this host, which share its cores.
        undo: receives what stops the worker and frees the arena, in case the caller fails later.
        weights_on_host: whether `weights` are on the host.
        gradients: what they take; None: the caller cannot take them to the host during backward. Whether they go there
            says the result's ``link.fills_early``.

    Raises:
        ConfigError: settings contradict each other, or the optimizer is another.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena, or the accelerator its share.
        WorkerError: the worker does not start, or another rank has raised one of these errors.
    """
    config, parts = run.config, [weights(index) for index in range(len(groups))]
    _agree(run, groups, (weights_on_host, gradients is not None), ranks)
    kind, metrics = hosted(optimizer, config), Metrics()
    publish_dtype = config.publish_dtype or dtype_name(parts[0].dtype)
    numels = [part.numel() for part in parts]
    settings = _settings(run, kind, parts[0].device, weights_on_host, fills_early=True)
    fills_early = weights_on_host
    if gradients is not None and not weights_on_host:
        arena = bytes_at_start(arena_specs(settings, numels, publish_dtype, dtype_name(grad_dtype)))
        fills_early = gradients_go_to_host(run, gradients.accelerator, arena + gradients.sums, ranks)
    settings = replace(settings, fills_early=fills_early)
    heads = _heads(run, numels, settings, ranks)
    _prepare_kernels(kind, settings, parts, publish_dtype, grad_dtype, any(heads), warns=ranks.rank == 0)
    on_host = [numel - head for numel, head in zip(numels, heads, strict=True)]
    hides = False if fills_early else config.hide_transfers
    described = _results(settings, on_host, publish_dtype)
    buffers = allocate_landing_buffers(hides, described, grad_dtype, ranks)
    dtypes = publish_dtype, dtype_name(grad_dtype)
    slots = None if buffers is None else chunk_slots(settings, sum(on_host), max(on_host, default=0), *dtypes)
    specs = arena_specs(settings, numels, *dtypes, heads, in_chunks=slots is not None)
    link = WorkerLink(
        [*specs, *([] if slots is None else slot_specs(slots, *dtypes))],
        buffers,
        block_size=settings.block_size,
        placement=placement,
        threads=unbound_threads(config.reserved_cores, local_ranks) if placement is None else placement.threads,
        weights_on_host=weights_on_host,
        fills_early=fills_early,
        ranks=ranks,
        timeout_seconds=run.worker_timeout_seconds,
        metrics=metrics,
    )
    undo.callback(link.abandon)
    share = None
    if any(heads):
        share = AcceleratorShare.on_all_ranks(
            parts, heads, link.arena, settings.block_size, parts[0].device, ranks, kind
        )
    states = [_state(kind, i, group, link.arena, partial(weights, i)) for i, group in enumerate(groups)]
    partitions = [
        _partition(i, state, holders[i], settings, link.arena, heads[i], (publish_dtype, grad_dtype))
        for i, state in enumerate(states)
    ]
    for partition, part, head in zip(partitions, parts, heads, strict=True):
        _copy_to_host(part[head:], partition.master)
    rule: UpdateRule[Any]
    if isinstance(settings, SelectiveSettings):
        rule = SelectiveRule(settings, partitions, link, ranks, kind, metrics)
    else:
        rule = PredictiveRule(settings, partitions, link, ranks, kind, metrics)
    return OffloadedAdam(rule, partitions, states, share, link, optimizer, kind, ranks, metrics)


def _agree(run: ZenFlowRun, groups: Sequence[int], places: tuple[bool, bool], ranks: RankGroup) -> None:
    """Raise on every rank if settings differ between ranks."""
    fields = run.config.model_dump(exclude={"pt_reserved_cores", "pt_reserved_cores_perc"})
    epoch = run.steps_per_epoch if run.config.select_strategy == "epoch" else None  # ranks may load different data
    require_same_plan("ZenFlow", (fields, epoch, list(groups), run.host_share, *places), ranks)


def _settings(
    run: ZenFlowRun, kind: HostedOptimizer, device: torch.device, weights_on_host: bool, *, fills_early: bool
) -> PredictiveSettings | SelectiveSettings:
    on_host = {
        "weights_on_host": weights_on_host,
        "fills_early": fills_early,
        "fills_before_y": device.type == "cpu",
    }
    if run.config.rule == "selective":
        return SelectiveSettings.of(run.config, run.steps_per_epoch, **on_host)
    return PredictiveSettings.of(run.config, layout=kind.layout, **on_host)


def _results(settings: RuleSettings, numels: Sequence[int], publish_dtype: str) -> list[Results]:
    """What the worker will write for each partition: dtypes and sizes, on the meta device."""
    like = partial(torch.empty, device="meta")
    kind, dtype, _ = settings.per_block
    found = []
    for numel in numels:
        blocks, width = -(-numel // settings.block_size), settings.per_block_width
        shape = (blocks,) if width == 1 else (blocks, width)
        means = like(shape, dtype=getattr(torch, dtype)) if kind in ("block_means", "known") else None
        found.append(Results(like(numel, dtype=getattr(torch, publish_dtype)), means))
    return found


def _copy_to_host(weights: torch.Tensor, master: torch.Tensor) -> None:
    """Make p (1-D fp32 [n], host) from weights of any dtype, without an fp32 copy of all of them on the accelerator."""
    if weights.device == master.device:
        master.copy_(weights)
    else:
        Staging(weights.dtype, pin=True).to_host(weights, master)


def _heads(run: ZenFlowRun, numels: Sequence[int], settings: RuleSettings, ranks: RankGroup) -> list[int]:
    """How many elements at the start of each partition step on the accelerator. A collective if that is measured."""
    share, block_size = run.host_share, settings.block_size
    if share is None:
        reserve = run.config.offload_reserve_fraction
        share = host_share_that_fits(numels, block_size, reserve, ranks, settings.layout)
    return [accelerator_numel(numel, share, block_size) for numel in numels]


def _prepare_kernels(
    kind: HostedOptimizer,
    settings: PredictiveSettings | SelectiveSettings,
    weights: Sequence[torch.Tensor],
    publish_dtype: str,
    grad_dtype: torch.dtype,
    has_share: bool,
    *,
    warns: bool,
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it.

    A partition's gradient and results are at least as aligned as its weights: they have arrays of their own, or lie
    in one as the weights do.
    """
    device, dtype, block_size = weights[0].device, weights[0].dtype, settings.block_size
    calls: list[Iterable[Callable[[], object]]] = [prepare.norms(device, {dtype, grad_dtype})]
    is_computed_there = not settings.fills_early
    alignments = {launch.is_aligned(block_size, [part]) for part in weights}
    if (isinstance(settings, SelectiveSettings) and is_computed_there) or has_share:
        calls.append(kind.step_kernels(device, block_size, grad_dtype, alignments if has_share else {True}))
    if isinstance(settings, PredictiveSettings) and settings.overlapped and is_computed_there:
        dtypes = dtype, getattr(torch, publish_dtype), grad_dtype
        calls.append(kind.estimate_kernels(device, block_size, *dtypes, settings.with_drift, alignments))
    prepare.prepare(device, block_size, chain(*calls), warns=warns)


def _state(
    kind: HostedOptimizer, index: int, group: int, arena: Arena, weights: Callable[[], torch.Tensor]
) -> WholeState:
    p, *moments = (arena.whole(each, index) for each in kind.layout.kinds)
    return WholeState(group, weights, p.requires_grad_(), dict(zip(kind.layout.names, moments, strict=True)))


def _partition(
    index: int,
    state: WholeState,
    holders: RankGroup,
    settings: RuleSettings,
    arena: Arena,
    head: int,
    dtypes: tuple[str, torch.dtype],
) -> Partition:
    """What remains of a partition behind its first `head` elements, for the rule."""
    per_block, *_ = settings.per_block
    return Partition(
        index,
        state.group,
        holders,
        (lambda: state.weights()[head:]) if head else state.weights,
        master=arena.tensor("p", index),
        moments=tuple(arena.tensor(kind, index) for kind, _ in settings.layout.moments),
        publish_dtype=getattr(torch, dtypes[0]),
        grad_dtype=dtypes[1],
        per_block=arena.tensor(per_block, index),
        ring=[arena.tensor(*key) for key in arena.keys("g", index)],
        on_host=settings.fills_early,
    )
