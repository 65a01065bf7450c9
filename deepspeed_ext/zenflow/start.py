"""Starts a rank's optimizer process and builds `HostOptimizer` around it: facts are exchanged once,
plans compared once, and exactly the plan is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.cores.plan import unbound_threads
from deepspeed_ext.errors import ConfigError, OutOfMemoryError
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory, proc
from deepspeed_ext.runtime.backend import get_accelerator, local_world_size
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, agreed, require_same_plan, together, within
from deepspeed_ext.zenflow.optimizers import kind_of
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Ratio, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, streams_in_step
from deepspeed_ext.zenflow.plan.times import thread_counts
from deepspeed_ext.zenflow.rules import RULES
from deepspeed_ext.zenflow.step.first_steps import FirstSteps
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.link import WorkerLink, WorkerThreads
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.rule import Partition, WholeState
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.transfers.landing import LandingBuffer, landing_buffers
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout


def with_timeout(
    config: ZenFlowConfig, group_timeouts_seconds: Iterable[float] = ()
) -> ZenFlowConfig:
    """`config` with a default timeout that is lowered if the collectives in which other ranks wait
    would time out first, after `group_timeouts_seconds`.

    Raises:
        ConfigError: the user's timeout is not below that of the collectives.
    """
    timeout = config.worker_timeout_seconds
    shortest = min(group_timeouts_seconds, default=float("inf"))
    if timeout < shortest:
        return config
    if "worker_timeout_seconds" in config.model_fields_set:
        raise ConfigError(
            f"zero_optimization.zenflow.worker_timeout_seconds = {timeout:g} is not below the "
            f"process group's timeout of {shortest:g} s, after which the communication library "
            "ends the job: lower it, or raise the group's timeout (init_distributed, or "
            "DEEPSPEED_TIMEOUT in minutes)"
        )
    return config.model_copy(update={"worker_timeout_seconds": shortest / 2})


@dataclass(frozen=True)
class ZenFlowStart:
    """What an engine passes to its ZenFlow optimizer.

    Attributes:
        config: from `with_timeout`.
        ranks: the ranks that the model is spread over. They agree on every choice that changes
            weights, and an error on one is raised on all.
        undo: receives the callback that stops the worker and frees the arena, in case the engine's
            constructor fails later.
        binding: this rank's cores; None: unbound.
        ratio: ``offload_optimizer.ratio``.
        steps_per_epoch: optimizer steps per epoch; None: unknown, because DeepSpeed did not build
            the data loader.
        sums: dtype in which the config asks to sum micro-steps.
    """

    config: ZenFlowConfig
    ranks: RankGroup
    undo: ExitStack
    binding: CoreBinding | None = None
    ratio: Ratio = 1.0
    steps_per_epoch: int | None = None
    sums: torch.dtype | None = None


def start_optimizer(
    start: ZenFlowStart,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    caller: Caller,
    replicas: RankGroup,
) -> HostOptimizer:
    """Make this rank's plan, and build exactly that. A collective.

    Args:
        groups: index of the parameter group of each partition.
        weights: returns a partition's weights, 1-D, in the model's dtype: the initial values of p.
            They are written in place.
        caller: what the caller does with weights and gradients. It must follow the result's
            ``decided``.
        replicas: the data-parallel ranks, whose partitions are in the same order.

    Raises:
        ConfigError: settings contradict each other, or ZenFlow does not run this optimizer.
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena, or the
            accelerator cannot hold its share.
        WorkerError: the worker does not start, or another rank raised one of these errors.
    """
    ranks, parts = start.ranks, [weights(index) for index in range(len(groups))]
    with together(ranks, otherwise=None):
        kind = kind_of(optimizer, start.config)
        threads = _threads(start)
    with together(ranks):
        mine = RankFacts(
            tuple(Run(part.numel()) for part in parts),
            memory.free_accelerator_bytes(),
            memory.total_accelerator_bytes(),
            proc.host_id(),
            tuple(sorted(proc.available_by_limit().items())),
        )
    is_on_cpu = get_accelerator().is_synchronized_device()
    layout, every = type(kind).layout, tuple(ranks.gather_objects(mine))
    facts = ZenFlowFacts(every, caller, ranks.rank, layout, is_on_cpu=is_on_cpu)
    with within(ranks, replicas):  # stages of a pipeline may have different groups
        require_same_plan("ZenFlow's partitions", list(groups), replicas)
    plan, buffers = _plan_with_buffers(facts, start)
    with together(ranks):
        kind.prepare_kernels(plan, parts, warns=ranks.rank == 0)
    link = WorkerLink(plan, buffers, threads, ranks, metrics := Metrics())
    start.undo.callback(link.close)
    heads = (
        Heads.if_all_have_room(plan, parts, link.arena, kind, ranks) if plan.head_bytes else None
    )
    if plan.head_bytes and heads is None:
        raise OutOfMemoryError(
            f"offload_optimizer.ratio keeps {plan.head_bytes:,} bytes of the optimizer on the "
            f"accelerator of rank {ranks.rank}, and a rank has no memory for its part: raise the "
            'ratio, or set it to "auto"'
        )
    states = [
        _state(plan.rule.layout, i, group, link.arena, partial(weights, i))
        for i, group in enumerate(groups)
    ]
    partitions = [Partition.of(plan, i, state, link.arena) for i, state in enumerate(states)]
    for partition, part, decided in zip(partitions, parts, plan.partitions, strict=True):
        if part.device == partition.master.device:
            partition.master.copy_(part[decided.head :])
        else:  # in chunks, without an fp32 copy on the accelerator
            Staging(part.dtype).to_host(part[decided.head :], partition.master)
    rule = RULES[plan.rule.name](plan, partitions, link, kind, ranks)
    store = StateStore(link, rule, kind, partitions, states, heads)
    host = HostOptimizer(plan, rule, store, link, kind, ranks)
    host.first_steps = _first_steps(start, plan, threads, metrics)
    return host


def _threads(start: ZenFlowStart) -> WorkerThreads:
    config = start.config
    placement = None if start.binding is None else start.binding.worker_placement
    if placement is not None:
        return WorkerThreads(placement, placement.threads, config.worker_timeout_seconds)
    on_cpu = get_accelerator().is_synchronized_device()
    count = unbound_threads(config.pt_reserved_cores, local_world_size(), on_cpu=on_cpu)
    return WorkerThreads(None, count, config.worker_timeout_seconds)


def _plan_with_buffers(
    facts: ZenFlowFacts, start: ZenFlowStart
) -> tuple[ZenFlowPlan, list[LandingBuffer]]:
    """The plan, and its landing buffers if every rank can allocate them. A collective."""
    plan = _agreed_plan(facts, start)
    buffers = landing_buffers(plan, start.ranks)
    if buffers is None:
        plan, buffers = _agreed_plan(replace(facts, refuses_landing=True), start), []
    if plan.shortage is not None:
        raise agreed(OutOfMemoryError(plan.shortage), start.ranks)
    return plan, buffers


def _agreed_plan(facts: ZenFlowFacts, start: ZenFlowStart) -> ZenFlowPlan:
    """The plan of this rank. A collective."""
    config, ranks, steps = start.config, start.ranks, start.steps_per_epoch
    with together(ranks, otherwise=None):
        plan = decide(facts, config, ratio=start.ratio, steps_per_epoch=steps)
    fields = config.model_dump(exclude={"pt_reserved_cores"})
    by_epoch = config.select_strategy == "epoch"  # otherwise ranks may load different data
    settings = fields, steps if by_epoch else None, start.ratio
    require_same_plan("ZenFlow", (settings, facts.caller, plan.decisions), ranks)
    if ranks.rank == 0:
        if plan.rule.warning is not None:
            logger.warning(plan.rule.warning)
        is_chosen = plan.measures_share or plan.host_share not in (1.0, start.ratio)
        logger.log(logging.INFO if is_chosen else logging.DEBUG, plan.share_reason)
        for reason in plan.other_reasons:
            logger.debug(reason)
    return plan


def _first_steps(
    start: ZenFlowStart, plan: ZenFlowPlan, threads: WorkerThreads, metrics: Metrics
) -> FirstSteps | None:
    """What chooses a better plan and says what limits a step; None: there is nothing to choose, and
    steps hide nothing, or weights arrive in the forward.

    Threads stay under a rule with limits (`RuleSettings.limits`), on the CPU as accelerator, where
    the pass and forward share cores, and where they are pinned near their memory.
    """
    config, rule, count = start.config, plan.rule, threads.count
    if plan.wait is Wait.FORWARD and not rule.overlapped:
        return None
    pinned = threads.placement is not None and threads.placement.pin_each_thread
    is_on_cpu = get_accelerator().is_synchronized_device()
    stay = pinned or is_on_cpu or rule.limits or not config.autotune
    counts = (count,) if stay else thread_counts(count)
    if not (rule.overlapped or streams_in_step(plan) or plan.measures_share or len(counts) > 1):
        return None
    of_rank = None if start.binding is None else start.binding.cores
    cores = None if of_rank is None else (count, of_rank)
    return FirstSteps(metrics, config, plan.measures_share, counts=counts, cores=cores)


def _state(
    layout: StateLayout, index: int, group: int, arena: Arena, weights: Callable[[], torch.Tensor]
) -> WholeState:
    p, *moments = (arena.whole(each, index) for each in ("p", *layout.shown))
    return WholeState(
        group, weights, p.requires_grad_(), dict(zip(layout.names, moments, strict=True))
    )
