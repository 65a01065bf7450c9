"""Measures on every rank what the plan depends on, and makes the plan: facts are exchanged once and
plans compared once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_ext.runtime import memory, proc
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.proc import host_id
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, Cpus, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["agreed_plan", "facts_of_all"]


def facts_of_all(
    weights: Sequence[torch.Tensor],
    caller: Caller,
    layout: StateLayout,
    ranks: RankGroup,
    cpus: Cpus | None = None,
) -> ZenFlowFacts:
    """Measure this rank's facts and exchange them with all ranks. A collective.

    Args:
        weights: this rank's partitions, 1-D, already in their places.
        ranks: the ranks that the model is spread over.
        cpus: the CPUs of this rank's two processes.
    """
    with together(ranks):
        mine = RankFacts(
            tuple(Run(part.numel()) for part in weights),
            memory.free_accelerator_bytes(),
            memory.total_accelerator_bytes(),
            host_id(),
            tuple(sorted(proc.available_by_limit().items())),
            cpus,
        )
    return ZenFlowFacts(
        tuple(ranks.gather_objects(mine)),
        caller,
        ranks.rank,
        layout,
        is_on_cpu=get_accelerator().is_synchronized_device(),
    )


def agreed_plan(facts: ZenFlowFacts, run: ZenFlowRun, ranks: RankGroup) -> ZenFlowPlan:
    """The plan of this rank. A collective.

    Args:
        ranks: the ranks that the model is spread over.

    Raises:
        ConfigError: the section contradicts itself.
        PlanMismatchError: the ranks have different settings.
    """
    fields = run.config.model_dump(exclude={"pt_reserved_cores"})
    by_epoch = run.config.select_strategy == "epoch"  # otherwise ranks may load different data
    settings = fields, run.steps_per_epoch if by_epoch else None, run.ratio
    with together(ranks, otherwise=None):
        plan = decide(
            facts,
            run.config,
            ratio=run.ratio,
            steps_per_epoch=run.steps_per_epoch,
        )
    require_same_plan("ZenFlow", (settings, facts.caller, plan.decisions), ranks)
    if ranks.rank == 0:
        _log(plan)
    return plan


def _log(plan: ZenFlowPlan) -> None:
    if plan.rule.warning is not None:
        logger.warning(plan.rule.warning)
    if plan.cpus is not None:
        logger.debug(f"cores: {plan.cpus}")
    for reason in plan.reasons:
        (logger.info if reason.is_open else logger.debug)(str(reason))
