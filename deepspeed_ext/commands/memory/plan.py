"""Plans the memory of a run, and lists similar runs for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepspeed_ext.commands.memory.accelerator import accelerator_parts
from deepspeed_ext.commands.memory.host import host_parts
from deepspeed_ext.commands.memory.parts import Capacity, MemoryPlan, Place
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage
from deepspeed_ext.config import ZenFlowConfig, ZeroFields
from deepspeed_ext.flatten.plan import FlattenFacts, choose_tier
from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.plan.decide import MOST_FOR_GRADIENTS
from deepspeed_ext.zenflow.plan.facts import RankFacts
from deepspeed_ext.zenflow.plan.places import Copies

__all__ = ["neighbours", "plan_memory", "settled_on"]

STAGES: tuple[Stage, ...] = (1, 2, 3)
INTERVALS = (1, 2, 4, 8)


def plan_memory(model: Model, ranks: Ranks, setup: Setup) -> MemoryPlan:
    """Plan one run.

    Raises:
        ConfigError: the ``zenflow`` section contradicts itself.
    """
    parts = {(Place.ACCELERATOR, phase): found for phase, found in accelerator_parts(model, ranks, setup).items()}
    parts |= {(Place.HOST, phase): found for phase, found in host_parts(model, ranks, setup, first=True).items()}
    others = {
        phase: sum(part.nbytes for part in found)
        for phase, found in host_parts(model, ranks, setup, first=False).items()
    }
    return MemoryPlan(model, ranks, setup, parts, others, tuple(_notes(setup)))


def settled_on(capacity: Capacity, model: Model, ranks: Ranks, setup: Setup) -> Setup:
    """`setup` with what a run chooses on such a machine, on whose accelerators only the weights lie: the flatten tier,
    and where gradients go. Unchanged if the accelerator's memory is not known."""
    if capacity.accelerator is None:
        return setup
    flattened = _flattened(capacity.accelerator, model, ranks, setup)
    return _with_gradients(capacity.accelerator, capacity.host, model, ranks, flattened)


def _with_gradients(accelerator: int, host: int | None, model: Model, ranks: Ranks, setup: Setup) -> Setup:
    zenflow = setup.zenflow
    if (
        zenflow is None
        or zenflow.gradients_on_host is not None
        or setup.weights is places.Place.HOST
        or setup.stage == 1
    ):
        return setup
    partitions = tuple(setup.partitions(model, ranks))
    numel = sum(run.numel * run.times for run in partitions)
    weights = model.itemsize * (numel if setup.partitions_weights else model.params)
    of_host = () if host is None else (("machine", host),)
    facts = RankFacts(partitions, accelerator - weights, accelerator, host_free=of_host)
    plan = setup.zenflow_plan(model, ranks, facts)
    chosen = {"gradients_on_host": plan.copies is Copies.WEIGHTS}
    section = zenflow.model_dump(exclude_unset=True) | chosen
    return replace(setup, zenflow=ZenFlowConfig(**section))


def _flattened(accelerator: int, model: Model, ranks: Ranks, setup: Setup) -> Setup:
    if setup.flatten_tier is not None or setup.partitions_weights:
        return setup
    weights = model.itemsize * model.params
    facts = FlattenFacts(weights, ranks.count, accelerator - weights, accelerator)
    chosen = choose_tier(facts, reserve_fraction=ZeroFields().flatten_reserve_fraction)
    return replace(setup, flatten_tier=chosen.tier)


def _notes(setup: Setup) -> Iterator[str]:
    zenflow, leaves_early = setup.zenflow, setup.copies in (Copies.WEIGHTS, Copies.NONE)
    if setup.partitions_weights:
        yield "live parameters: the most that max_live_parameters and max_reuse_distance allow"
    if setup.partitions_weights and leaves_early:
        yield "start-up: a module that zero.Init has not partitioned is moved to the accelerator whole; not counted"
    if zenflow is not None and zenflow.interval is None:
        yield f"the interval is measured at the start: 1 to {setup.rule.longest_interval}, counted as the longest"
    if zenflow is not None and zenflow.hide_transfers is None and not leaves_early:
        yield "the landing buffers are left out if a rank would have less than a tenth of its accelerator memory free"
    if zenflow is not None and zenflow.hide_transfers is False and setup.partitions_weights and not leaves_early:
        yield "a slow link may keep one more flat gradient of a sub-group alive"
    if zenflow is not None and zenflow.gradients_on_host is None and setup.stage != 1 and not leaves_early:
        yield f"gradients go to the host if they would take more than {MOST_FOR_GRADIENTS:.0%} of what is free"
    if zenflow is not None and zenflow.rule == "selective":
        yield "hot blocks are counted as if all ranks had as many; a rank may have up to twice as many"
    if setup.stage == 1 and setup.accumulates_fp32 and zenflow is None:
        yield "DeepSpeed may use its BF16_Optimizer for stage 1 with fp32 accumulation, which is not planned"


def neighbours(setup: Setup) -> list[Setup]:
    """The run at the other stages, with ZenFlow on or off, and at other intervals; the run itself comes first."""
    found = [setup, *(replace(setup, stage=stage) for stage in STAGES)]
    found.append(replace(setup, offload=False, zenflow=None))
    if not setup.offload:
        found.append(replace(setup, offload=True, zenflow=None, pins=True, fused_adam=True))
    longest = setup.layout.longest_interval or max(INTERVALS)
    found += [_with_zenflow(setup, interval) for interval in INTERVALS if interval <= longest]
    return list(dict.fromkeys(found))


def _with_zenflow(setup: Setup, interval: int) -> Setup:
    """`setup` with ZenFlow at `interval`; with its own section if that allows this interval, otherwise with a default
    one."""
    section = setup.zenflow or ZenFlowConfig()
    given = section.model_dump(exclude_unset=True) | {"update_interval": interval}
    if "overlap_lag" in given:
        given["overlap_lag"] = min(given["overlap_lag"], interval)
    if given.get("select_interval") is not None and section.select_strategy != "epoch":
        given["select_interval"] = max(given["select_interval"], interval)
    return replace(setup, offload=False, zenflow=ZenFlowConfig(**given))
