"""Starts a rank's optimizer process and builds `OffloadedAdam` around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch

from deepspeed_ext.cores.worker_placement import WorkerPlacement, unbound_threads
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan
from deepspeed_ext.zenflow.kernels import prepare
from deepspeed_ext.zenflow.rules.predictive.rule import PredictiveRule
from deepspeed_ext.zenflow.rules.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.rules.selective.settings import SelectiveSettings
from deepspeed_ext.zenflow.step.hyperparameters import AdamHyperparameters
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.transfers.device_sizes import dtype_name
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.sizes import RuleSettings, arena_specs

__all__ = ["start_adam"]


def start_adam(
    run: ZenFlowRun,
    optimizer: torch.optim.Optimizer,
    masters: Sequence[torch.Tensor],
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    *,
    grad_dtype: torch.dtype,
    ranks: RankGroup,
    holders: Sequence[RankGroup],
    placement: WorkerPlacement | None,
    local_ranks: int,
    undo: ExitStack,
) -> OffloadedAdam:
    """Start this rank's worker. A collective.

    Args:
        run: the settings of this run.
        optimizer: the user's Adam or AdamW.
        masters: initial fp32 values, one 1-D tensor per partition; they are copied and may be freed afterwards.
        groups: index of the parameter group of each partition.
        weights: returns a partition's weights, 1-D, in the model's dtype, on the accelerator; they are written in
            place.
        grad_dtype: dtype in which gradients are handed over.
        ranks: the data-parallel ranks; all of them call this, with partitions in the same order.
        holders: for each partition, the ranks among which its parameters are divided.
        placement: the worker's cores and memory node from the core plan; None: unbound.
        local_ranks: number of ranks on this host, which share its cores.
        undo: receives what stops the worker and frees the arena, in case the caller fails later.

    Raises:
        ConfigError: settings contradict each other, or the optimizer is not an Adam.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena.
        WorkerError: the worker does not start, or another rank has raised one of these errors.
    """
    config = run.config
    fields = config.model_dump(exclude={"pt_reserved_cores", "pt_reserved_cores_perc"})
    epoch = run.steps_per_epoch if config.select_strategy == "epoch" else None  # ranks may load different data
    agreed = (fields, epoch, list(groups))
    require_same_plan("ZenFlow", agreed, ranks)
    hyperparameters, metrics = AdamHyperparameters(optimizer), Metrics()
    publish_dtype = config.publish_dtype or dtype_name(weights(0).dtype)

    def start_worker(settings: RuleSettings) -> tuple[list[Partition], WorkerLink]:
        specs = arena_specs(settings, [master.numel() for master in masters], publish_dtype, dtype_name(grad_dtype))
        link = WorkerLink(
            specs,
            block_size=settings.block_size,
            placement=placement,
            threads=unbound_threads(config.reserved_cores, local_ranks) if placement is None else placement.threads,
            hide_transfers=config.hide_transfers,
            ranks=ranks,
            timeout_seconds=run.worker_timeout_seconds,
            metrics=metrics,
        )
        undo.callback(link.abandon)
        partitions = [
            _partition(i, group, holders[i], settings, link.arena, partial(weights, i))
            for i, group in enumerate(groups)
        ]
        for partition, master in zip(partitions, masters, strict=True):
            partition.master.data.copy_(master)
        return partitions, link

    rule: UpdateRule[Any]
    if config.rule == "selective":
        selective = SelectiveSettings.of(config, run.steps_per_epoch)
        _prepare_kernels(selective, weights(0), publish_dtype, grad_dtype, warns=ranks.rank == 0)
        partitions, link = start_worker(selective)
        rule = SelectiveRule(selective, partitions, link, ranks, hyperparameters, metrics)
    else:
        predictive = PredictiveSettings.of(config)
        _prepare_kernels(predictive, weights(0), publish_dtype, grad_dtype, warns=ranks.rank == 0)
        partitions, link = start_worker(predictive)
        rule = PredictiveRule(predictive, partitions, link, ranks, metrics)
    return OffloadedAdam(rule, partitions, link, optimizer, hyperparameters, ranks, metrics)


def _prepare_kernels(
    settings: PredictiveSettings | SelectiveSettings,
    weights: torch.Tensor,
    publish_dtype: str,
    grad_dtype: torch.dtype,
    *,
    warns: bool,
) -> None:
    """Compile the kernels that steps will launch, so that no step compiles or needs memory for it."""
    device, block_size = weights.device, settings.block_size
    norms = prepare.norms(device, {weights.dtype, grad_dtype})
    if isinstance(settings, SelectiveSettings):
        calls: Iterable[Callable[[], object]] = prepare.hot_steps(device, block_size, grad_dtype)
    elif settings.overlapped:
        published = getattr(torch, publish_dtype)
        calls = prepare.estimates(device, block_size, weights.dtype, published, grad_dtype, settings.with_drift)
    else:
        calls = ()
    prepare.prepare(device, block_size, chain(norms, calls), warns=warns)


def _partition(
    index: int,
    group: int,
    holders: RankGroup,
    settings: RuleSettings,
    arena: Arena,
    weights: Callable[[], torch.Tensor],
) -> Partition:
    per_block, *_ = settings.per_block
    return Partition(
        index,
        group,
        holders,
        weights,
        master=arena.tensor("p", index).requires_grad_(),
        exp_avg=arena.tensor("m", index),
        exp_avg_sq=arena.tensor("v", index),
        published=arena.tensor("y", index),
        per_block=arena.tensor(per_block, index),
        ring=[arena.tensor("g", index, slot) for slot in range(settings.slots)],
    )
