"""Wraps the construction of an engine: an error of one rank is raised on every rank, and the log
lists the enabled systems.

An engine is built inside `built_together`, including DeepSpeed's own constructors: a rank that
fails anywhere reports it at the other ranks' next agreement. If a collective of DeepSpeed comes
before that agreement, the others wait in it.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from deepspeed_ext.adapter.gather_hooks import SingleParameterGather
from deepspeed_ext.adapter.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.adapter.upstream import model_groups, pipeline_topology
from deepspeed_ext.adapter.zenflow_parts import zenflow_of
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.errors import ConfigError, StateError
from deepspeed_ext.flatten.plan import TIERS, FlattenPlan
from deepspeed_ext.runtime.backend import (
    SHARED_MEMORY,
    dist,
    get_accelerator,
    has_host_memory,
    local_rank,
    single_queue,
)
from deepspeed_ext.runtime.log import counted, logger, warn_once
from deepspeed_ext.runtime.proc import format_cpulist
from deepspeed_ext.runtime.ranks import GridRanks, RankGroup, raise_together
from deepspeed_ext.zenflow.plan.held import Held
from deepspeed_ext.zenflow.plan.phases import Phase, nbytes_of
from deepspeed_ext.zenflow.plan.places import Copies, Place, Source, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["built_together", "joint", "log_start", "ranks_of_model"]


def ranks_of_model(mpu: Any, *, keeps_scratch: bool = False) -> RankGroup:
    """Return the ranks that the model is spread over. They build, step, save and load together, so
    they agree on every choice that changes weights, and an error of one is raised on all.

    Without an `mpu` these are all ranks. With one, which may give each engine other ranks, they are
    the grid of its data-, tensor-, pipeline- and sequence-parallel groups. DeepSpeed reduces norm
    and overflow over the same grid, at the same points of a step. No collective.

    Args:
        mpu: as given to ``deepspeed.initialize``, or a pipeline's; None also with AutoTP, whose
            groups span all ranks.
        keeps_scratch: see `RankGroup.of`.

    Raises:
        ConfigError: the groups of `mpu` are not a grid.
    """
    if not dist.is_initialized():
        return RankGroup.alone()
    if mpu is None:
        return RankGroup.of(None, keeps_scratch=keeps_scratch)
    axes: list[tuple[set[int], Any]] = []
    for name, group in model_groups(mpu).items():
        members = set(torch.distributed.get_process_group_ranks(group))
        if any(members <= others for others, _ in axes):
            continue
        axes = [(others, each) for others, each in axes if not others <= members]
        if any(len(members & others) > 1 for others, _ in axes):
            raise ConfigError(
                f"rank {dist.get_rank()}: mpu.{name}() has ranks {sorted(members)} and shares "
                f"several of them with one of {[sorted(others) for others, _ in axes]}, other "
                "groups of the mpu: two groups may share one rank, or one may contain the other"
            )
        axes.append((members, group))
    return GridRanks.along([RankGroup.of(group, keeps_scratch=keeps_scratch) for _, group in axes])


@contextmanager
def built_together(mpu: Any) -> Iterator[None]:
    """Raise an error of the block on every rank, as `together` does. If all ranks have errors of
    one type, each raises its own."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
        if dist.is_initialized():
            with suppress(Exception):  # this rank may have no device of its own
                # the agreement needs it, and the block may have failed before setting it
                get_accelerator().set_device(local_rank())
    raise_together(ranks_of_model(mpu), error, otherwise=None)


def joint(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `deepspeed.initialize` in an agreement: an error of one rank, such as an unreadable
    config, is raised on every rank. The other ranks learn of it at their first agreement."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def joint_initialize(*args: Any, **kwargs: Any) -> Any:
        _require_own_group()
        given = signature.bind_partial(*args, **kwargs).arguments
        topology = given.get("mpu") or pipeline_topology(given.get("model"))
        with built_together(topology):
            return initialize(*args, **kwargs)

    return joint_initialize


_group_at_fork: weakref.ref[Any] | None = None
"""In a forked process: the process group that it has from its parent."""


def _note_group_at_fork() -> None:
    global _group_at_fork
    group = torch.distributed.group.WORLD
    _group_at_fork = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_note_group_at_fork)


def _require_own_group() -> None:
    """Check that the process group is not that of a parent, whose threads this process does not
    have: a collective would never end (Note: [Forked processes])."""
    if _group_at_fork is not None and _group_at_fork() is torch.distributed.group.WORLD is not None:
        raise StateError(
            f"deepspeed.initialize was called in process {os.getpid()}, which was forked from "
            f"process {os.getppid()} when that had a process group already, so its collectives "
            "would never end: fork before the parent trains, or start it with "
            'multiprocessing.get_context("spawn")'
        )


MOST_RANKS = 8
"""Maximum number of this host's ranks whose cores are listed; `deepspeed-ext plan` lists all."""


def log_start(
    settings: ZeroConfig | None,
    optimizer: Any,
    gather: SingleParameterGather | None,
    binding: CoreBinding | None,
) -> None:
    """Log on rank 0 which of our systems an engine uses.

    Args:
        settings: the engine's ``zero_optimization``; None, if the extension was off when it was
            read: nothing is logged.
        gather: the single-parameter gather; None: DeepSpeed gathers.
        binding: this rank's core binding; None: unbound.
    """
    if dist.get_rank() != 0 or settings is None:
        return
    if lines := _report(settings, optimizer, gather, binding):
        ranks = dist.get_world_size()
        title = f"ZeRO stage {int(settings.stage)} on {ranks} rank{'s' if ranks > 1 else ''}, with"
        logger.info("\n".join([title, *lines]))
    zenflow = zenflow_of(optimizer) is not None
    if (
        zenflow
        and not get_accelerator().is_synchronized_device()
        and (told := single_queue(os.environ))
    ):
        warn_once(told)
    if zenflow and has_host_memory():
        warn_once(
            f"the accelerator's memory is the host's, so offload frees nothing: {SHARED_MEMORY}"
        )


def _report(
    settings: ZeroConfig,
    optimizer: Any,
    gather: SingleParameterGather | None,
    binding: CoreBinding | None,
) -> list[str]:
    """One or more lines for each system in use."""
    parts: list[tuple[str, str]] = []
    if (zenflow := zenflow_of(optimizer)) is not None and settings.zenflow is not None:
        parts += [("ZenFlow", line) for line in _zenflow(settings.zenflow, zenflow.host)]
    if isinstance(optimizer, ZeroOptimizer) and optimizer.flatten_plans:
        parts.append(("flattening", _flattening(optimizer.flatten_plans)))
    if gather is not None:
        parts.append(("gather", gather.plan.describe()))
    if binding is not None and binding.plan is not None:
        parts += [("cores", line) for line in _cores(binding)]
    before = ["", *(name for name, _ in parts)]
    return [
        f"  {'' if name == last else name:<12}{line}"
        for last, (name, line) in zip(before, parts, strict=False)
    ]


def _zenflow(settings: ZenFlowConfig, host: HostOptimizer) -> Iterator[str]:
    schedule = host.rule.schedule
    layout = host.kind.layout
    rounded = (
        ""
        if layout.moment_dtype == "float32"
        else f", moments in {layout.moment_dtype} (not exact)"
    )
    rule = "exact" if host.decided.streams else settings.rule
    how = f"{rule} rule{rounded}"
    yield f"{layout.name.capitalize()} runs in a process of its own, one per rank; {how}"
    if host.decided.rule.overlapped:
        first = schedule.warm_up_steps
        steps = (
            "the first step waits for its"
            if first == 1
            else f"the first {first} steps wait for their"
        )
        yield f"{steps} own update; updates of later steps overlap with the next step"
    else:
        waits = "every step waits for its own update"
        if host.decided.wait is Wait.FORWARD:
            waits = "exact weights arrive during the next forward"
        elif host.decided.peeks:
            waits = "every step waits for its exact weights, and not for p and the moments"
        yield waits
    if host.decided.source is Source.BACKWARD:
        computes = "" if host.decided.peeks else ", and the host computes the weights"
        yield f"gradients go to the host during backward{computes}"
    elif host.decided.copies is not Copies.NONE:
        yield f"gradients and results are copied {host.decided.copies.value}"
    yield _memory(host.decided)


def _memory(plan: ZenFlowPlan) -> str:
    """What ZenFlow holds on this rank."""
    there, held = Place.ACCELERATOR, Held(plan)
    here = held.parts(Place.HOST, Phase.BETWEEN)
    locked = nbytes_of([part for part in here if part.memory.is_page_locked])
    return (
        f"a rank holds {_mib(nbytes_of(here))} of the host, {_mib(locked)} of it page-locked, and "
        f"{_mib(held.nbytes(there, Phase.BETWEEN))} of the accelerator, "
        f"{_mib(held.nbytes(there, Phase.STEP))} in a step"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _flattening(plans: Sequence[FlattenPlan]) -> str:
    size = sum(plan.facts.buffer_bytes for plan in plans) / 2**20
    tiers = {plan.tier: plan.reason for plan in plans}
    how = ", ".join(
        tier if tier == TIERS[0] else f"{tier} ({reason})" for tier, reason in tiers.items()
    )
    return f"{size:,.1f} MiB of parameters in {counted(len(plans), 'group')}, tier {how}"


def _cores(binding: CoreBinding) -> Iterator[str]:
    ranks = binding.agreement.host.ranks if binding.agreement.host is not None else ()
    for rank in ranks[:MOST_RANKS]:
        optimizer = f", optimizer on {format_cpulist(rank.optimizer)}" if rank.optimizer else ""
        yield f"local rank {rank.local_rank}: PyTorch on {format_cpulist(rank.pytorch)}{optimizer}"
    if len(ranks) > MOST_RANKS:
        yield f"and {len(ranks) - MOST_RANKS} more ranks; `deepspeed-ext plan` lists all"
