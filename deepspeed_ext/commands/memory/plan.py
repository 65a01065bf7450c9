"""Adds up what ZenFlow's plan and DeepSpeed hold in one run, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.commands.memory.zero import Zero
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.flatten.plan import FlattenFacts, choose_tier
from deepspeed_ext.zenflow.plan.facts import RankFacts
from deepspeed_ext.zenflow.plan.held import Held, Holder, Part, Phase, nbytes_of, parts_within
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["PLACES", "Capacity", "MemoryPlan", "added_up", "plan_memory"]

PLACES = (Place.ACCELERATOR, Place.HOST)


@dataclass(frozen=True)
class Capacity:
    """Available memory: bytes of one accelerator and of one host; None: not known."""

    accelerator: int | None = None
    host: int | None = None


UNKNOWN = Capacity()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one run.

    Attributes:
        model, ranks, setup: what is planned.
        zenflow: ZenFlow's plan; None: DeepSpeed's own optimizer steps.
        parts: memory of the job's first rank at the largest moment of a phase, by place and phase.
            Only this rank writes the module in a save.
        others: host bytes of every other rank, by phase.
    """

    model: Model
    ranks: Ranks
    setup: Setup
    zenflow: ZenFlowPlan | None
    parts: Mapping[tuple[Place, Phase], tuple[Part, ...]]
    others: Mapping[Phase, int]

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a rank within a phase."""
        return nbytes_of(self.parts[place, phase])

    def peak(self, place: Place) -> int:
        """Maximum bytes of a rank over all phases."""
        return max(self.nbytes(place, phase) for phase in Phase)

    def page_locked(self, phase: Phase) -> int:
        """Page-locked bytes of a rank within a phase."""
        parts = self.parts[Place.HOST, phase]
        return sum(part.nbytes for part in parts if part.memory.is_page_locked)

    def on_host(self, phase: Phase) -> int:
        """Host bytes of all ranks of the first host within a phase."""
        return self.nbytes(Place.HOST, phase) + (self.ranks.per_host - 1) * self.others[phase]

    def host_peak(self) -> int:
        """Maximum host bytes of all ranks of the first host over all phases."""
        return max(map(self.on_host, Phase))


def plan_memory(
    model: Model, ranks: Ranks, setup: Setup, capacity: Capacity = UNKNOWN
) -> MemoryPlan:
    """Plan one run. The flatten tier and ZenFlow's decisions are those of a machine of this
    capacity whose accelerators hold nothing but the weights.

    Raises:
        ConfigError: the ``zenflow`` section contradicts itself.
    """
    total, mine = capacity.accelerator, None
    if total is not None:
        partitions = tuple(setup.partitions(model, ranks))
        elements = model.params
        if setup.partitions_weights:
            elements = sum(run.numel * run.times for run in partitions)
        weights = 0 if setup.weights is Place.HOST else model.itemsize * elements
        of_host = () if capacity.host is None else (("machine", capacity.host),)
        mine = RankFacts(partitions, max(0, total - weights), total, host_free=of_host)
        if setup.flatten_tier is None and not setup.partitions_weights:
            facts = FlattenFacts(weights, ranks.count, total - weights, total)
            chosen = choose_tier(facts, reserve_fraction=ZeroFields().flatten_reserve_fraction)
            setup = replace(setup, flatten_tier=chosen.tier)
    zenflow = None if setup.zenflow is None else setup.zenflow_plan(model, ranks, mine)
    return added_up(model, ranks, setup, zenflow)


def added_up(model: Model, ranks: Ranks, setup: Setup, zenflow: ZenFlowPlan | None) -> MemoryPlan:
    """What DeepSpeed and ZenFlow, with this plan, hold together."""

    def holders(*, is_first: bool) -> list[Holder]:
        ours = [] if zenflow is None else [Held(zenflow)]
        return [Zero(model, ranks, setup, zenflow, is_first=is_first), *ours]

    first, other = holders(is_first=True), holders(is_first=False)
    parts = {(place, at): parts_within(first, place, at) for place in PLACES for at in Phase}
    others = {phase: nbytes_of(parts_within(other, Place.HOST, phase)) for phase in Phase}
    return MemoryPlan(model, ranks, setup, zenflow, parts, others)
