"""Adds up what ZenFlow's plan and DeepSpeed hold in one run, and lists similar runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.deepspeed import Zero
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage
from deepspeed_ext.config import ZenFlowConfig, ZeroFields
from deepspeed_ext.flatten.plan import FlattenFacts, choose_tier
from deepspeed_ext.zenflow.plan.decide import MOST_FOR_GRADIENTS
from deepspeed_ext.zenflow.plan.facts import RankFacts
from deepspeed_ext.zenflow.plan.phases import Holder, Part, Phase, nbytes_of, parts_within
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["PLACES", "UNKNOWN", "Capacity", "MemoryPlan", "neighbours", "plan_memory"]

PLACES = (Place.ACCELERATOR, Place.HOST)
STAGES: tuple[Stage, ...] = (1, 2, 3)
INTERVALS = (1, 2, 4, 8)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one run.

    Attributes:
        model, ranks, setup: what is planned.
        zenflow: ZenFlow's plan; None: DeepSpeed's own optimizer steps.
        parts: memory of the job's first rank at the largest moment of a phase, by place and phase.
            Only this rank writes the module in a save.
        others: host bytes of every other rank, by phase.
        notes: what the plan assumes or leaves out.
    """

    model: Model
    ranks: Ranks
    setup: Setup
    zenflow: ZenFlowPlan | None
    parts: Mapping[tuple[Place, Phase], tuple[Part, ...]]
    others: Mapping[Phase, int]
    notes: tuple[str, ...]

    @property
    def copies(self) -> Copies | None:
        """What crosses the link for ZenFlow; None without ZenFlow."""
        return None if self.zenflow is None else self.zenflow.copies

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a rank within a phase."""
        return nbytes_of(self.parts[place, phase])

    def peak(self, place: Place) -> int:
        """Maximum bytes of a rank over all phases of every run."""
        return max(self.nbytes(place, phase) for phase in Phase if phase.is_in_every_run)

    def page_locked(self, phase: Phase) -> int:
        """Page-locked bytes of a rank within a phase."""
        parts = self.parts[Place.HOST, phase]
        return sum(part.nbytes for part in parts if part.memory.is_page_locked)

    def on_host(self, phase: Phase) -> int:
        """Host bytes of all ranks of the first host within a phase."""
        return self.nbytes(Place.HOST, phase) + (self.ranks.per_host - 1) * self.others[phase]

    def host_peak(self) -> int:
        """Maximum host bytes of all ranks of the first host over all phases of every run."""
        return max(self.on_host(phase) for phase in Phase if phase.is_in_every_run)


@dataclass(frozen=True)
class Capacity:
    """Available memory: bytes of one accelerator and of one host; None: not known."""

    accelerator: int | None = None
    host: int | None = None

    def left(self, plan: MemoryPlan) -> dict[Place, int]:
        """Bytes that remain at the plan's peak, for each place with a known capacity; if negative,
        the plan does not fit."""
        given = {Place.ACCELERATOR: self.accelerator, Place.HOST: self.host}
        needed = {Place.ACCELERATOR: plan.peak(Place.ACCELERATOR), Place.HOST: plan.host_peak()}
        return {place: size - needed[place] for place, size in given.items() if size is not None}


UNKNOWN = Capacity()


def plan_memory(
    model: Model, ranks: Ranks, setup: Setup, capacity: Capacity = UNKNOWN
) -> MemoryPlan:
    """Plan one run. The flatten tier and ZenFlow's decisions are those of a machine of this
    capacity whose accelerators hold nothing but the weights.

    Raises:
        ConfigError: the ``zenflow`` section contradicts itself.
    """
    setup = _flattened(capacity, model, ranks, setup)
    zenflow = None
    if setup.zenflow is not None:
        zenflow = setup.zenflow_plan(model, ranks, _facts(capacity, model, ranks, setup))
    first, other = (_holders(Zero(model, ranks, setup, zenflow, each)) for each in (True, False))
    found = {
        (place, phase): parts_within(first, place, phase) for place in PLACES for phase in Phase
    }
    others = {phase: nbytes_of(parts_within(other, Place.HOST, phase)) for phase in Phase}
    notes = tuple(_notes(setup, zenflow, is_known=capacity.accelerator is not None))
    return MemoryPlan(model, ranks, setup, zenflow, found, others, notes)


def _holders(zero: Zero) -> list[Holder]:
    return [zero] if zero.plan is None else [zero, zero.plan.held]


def _facts(capacity: Capacity, model: Model, ranks: Ranks, setup: Setup) -> RankFacts | None:
    total = capacity.accelerator
    if total is None:
        return None
    partitions = tuple(setup.partitions(model, ranks))
    numel = sum(run.numel * run.times for run in partitions)
    weights = model.itemsize * (numel if setup.partitions_weights else model.params)
    weights = 0 if setup.weights is Place.HOST else weights
    of_host = () if capacity.host is None else (("machine", capacity.host),)
    return RankFacts(partitions, max(0, total - weights), total, host_free=of_host)


def _flattened(capacity: Capacity, model: Model, ranks: Ranks, setup: Setup) -> Setup:
    total = capacity.accelerator
    if total is None or setup.flatten_tier is not None or setup.partitions_weights:
        return setup
    weights = model.itemsize * model.params
    facts = FlattenFacts(weights, ranks.count, total - weights, total)
    chosen = choose_tier(facts, reserve_fraction=ZeroFields().flatten_reserve_fraction)
    return replace(setup, flatten_tier=chosen.tier)


def _notes(setup: Setup, plan: ZenFlowPlan | None, *, is_known: bool) -> Iterator[str]:
    zenflow, gradients_leave = (
        setup.zenflow,
        plan is not None and plan.places.gradient is Place.HOST,
    )
    if setup.partitions_weights:
        yield "live parameters: the most that max_live_parameters and max_reuse_distance allow"
    if setup.partitions_weights and gradients_leave:
        yield (
            "start-up: a module that zero.Init has not partitioned "
            "is moved to the accelerator whole; not counted"
        )
    if zenflow is not None and not gradients_leave:
        if not is_known:
            yield (
                "the landing buffers are left out if a rank would "
                "have less than a tenth of its accelerator memory free"
            )
        if zenflow.gradients_on_host is None and setup.stage != 1 and not is_known:
            share = f"{MOST_FOR_GRADIENTS:.0%}"
            yield f"gradients go to the host if they would take more than {share} of what is free"
    if setup.stage == 1 and setup.accumulates_fp32 and zenflow is None:
        yield (
            "DeepSpeed may use its BF16_Optimizer for stage 1 "
            "with fp32 accumulation, which is not planned"
        )


def neighbours(setup: Setup) -> list[Setup]:
    """The run at the other stages, with ZenFlow on or off, and at other intervals; the run itself
    comes first."""
    found = [setup, *(replace(setup, stage=stage) for stage in STAGES)]
    found.append(replace(setup, offload=False, zenflow=None))
    if not setup.offload:
        found.append(replace(setup, offload=True, zenflow=None, pins=True, fused_adam=True))
    longest = setup.layout.longest_interval or max(INTERVALS)
    found += [_with_zenflow(setup, interval) for interval in INTERVALS if interval <= longest]
    return list(dict.fromkeys(found))


def _with_zenflow(setup: Setup, interval: int) -> Setup:
    """`setup` with ZenFlow at `interval`; with its own section if that allows this interval,
    otherwise with a default one."""
    section = setup.zenflow or ZenFlowConfig()
    given = section.model_dump(exclude_unset=True) | {"update_interval": interval}
    if given.get("select_interval") is not None and section.select_strategy != "epoch":
        given["select_interval"] = max(given["select_interval"], interval)
    return replace(setup, offload=False, zenflow=ZenFlowConfig(**given))
