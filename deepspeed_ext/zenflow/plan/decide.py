"""Decides everything about a run: a pure function from facts and config to the plan.

Decisions in order: how much steps on the accelerator, where gradients wait for their step, whether
copies run beside the next step. Each sees those before it, and the memory of all ranks: it drafts
the plan that each rank would have, and asks that for its bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.zenflow.plan import times
from deepspeed_ext.zenflow.plan.facts import RankFacts, Ratio, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import (
    EVERYTHING_ON_HOST,
    SLOTS_OF_CHUNKS,
    Copies,
    Place,
    Places,
    Source,
    Wait,
)
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, ZenFlowPlan, head_of, y_replaces_gradient
from deepspeed_ext.zenflow.plan.rule import RuleSettings, settings_of
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

MOST_FOR_GRADIENTS = 0.5
"""Fraction of the accelerator's free memory that gradients may take."""

LEAST_FREE = 0.1
"""Fraction of the accelerator's memory that must stay free beside landing buffers."""

Partitions = tuple[Run, ...]
_ON_ACCELERATOR = Places(Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST, Source.COPY)
_BESIDE = replace(_ON_ACCELERATOR, published=Place.ACCELERATOR)
_IN_BACKWARD = Places(Place.ACCELERATOR, Place.HOST, Place.HOST, Source.BACKWARD)


def decide(
    facts: ZenFlowFacts,
    config: ZenFlowConfig,
    *,
    ratio: Ratio = 1.0,
    steps_per_epoch: int | None = None,
) -> ZenFlowPlan:
    """The plan of a run.

    Args:
        config: the ``zenflow`` section.
        ratio: the fraction of each partition that steps on the host. "auto": all of it until steps
            are measured (`plan.times`), or as little as the accelerators' free memory allows if the
            rule has no steps to measure, `autotune` is off or a host is too small. None: 1, unless
            a share is harmless (`_Planner.may_share`).
        steps_per_epoch: optimizer steps per epoch; None: unknown.

    Raises:
        ConfigError: the section contradicts itself.
    """
    planner = _Planner.of(facts, config, steps_per_epoch)
    if planner.may_stream:
        exact = config.model_copy(update={"update_rule": "exact"})
        streamed = _Planner.of(facts, exact).plan(ratio)
        if not streamed.computes_there:
            return streamed
    return planner.plan(ratio)


class _Share(NamedTuple):
    """How much of each partition steps on the host, and why."""

    on_host: float
    why: str
    is_measured: bool = False
    """Whether it is chosen anew once steps are measured."""


@dataclass(frozen=True)
class _Planner:
    """Makes the decisions, one per method."""

    facts: ZenFlowFacts
    config: ZenFlowConfig
    rule: RuleSettings

    @classmethod
    def of(
        cls, facts: ZenFlowFacts, config: ZenFlowConfig, steps_per_epoch: int | None = None
    ) -> _Planner:
        layout = config.state_of(facts.layout)
        return cls(facts, config, settings_of(config, layout, steps_per_epoch))

    def plan(self, ratio: Ratio) -> ZenFlowPlan:
        """Make all decisions, in order."""
        share = self.share(ratio)
        places, of_gradients = self.gradients(share)
        if share.is_measured and places.gradient is Place.HOST:
            share = _Share(1.0, "gradients wait on the host, where they arrive in backward")
        places, of_copies = self.landing(places, share.on_host)
        shortage = self.host_shortage(places, share.on_host)
        if shortage is not None:
            goes = "set zenflow.gradients_on_host to false, or "
            or_stay = goes if places.copies is Copies.WEIGHTS else ""
            shortage = f"the optimizer's state needs {shortage}: {or_stay}use more hosts or memory"
        return replace(
            self.draft(self.facts.mine.partitions, places, share.on_host),
            measures_share=share.is_measured,
            shortage=shortage,
            share_reason=times.share_reason(share.on_host, share.why),
            other_reasons=(of_gradients, of_copies),
        )

    def draft(self, partitions: Partitions, places: Places, host_share: float) -> ZenFlowPlan:
        """The plan of a rank with these partitions, without reasons: what its bytes follow from."""
        size = self.rule.block_size
        planned = tuple(
            PartitionPlan(run.numel, head_of(run.numel, host_share, size), run.times)
            for run in partitions
        )
        plan = ZenFlowPlan(
            rule=self.rule,
            partitions=planned,
            places=places,
            host_share=host_share,
            caller=self.facts.caller,
            wait=self.wait(places),
            peeks=self.peeks,
            saves_beside=self.config.async_save,
        )
        return replace(plan, slot_numel=self._slot_numel(plan))

    def _slot_numel(self, plan: ZenFlowPlan) -> int:
        """Elements of the few slots on the host that chunks of copies beside the step share; 0:
        they share none.

        They may if no gradient or y is read on the host after its chunk has been stepped and sent
        back; if y fits in its gradient's place; and if slots take less memory than whole gradients.
        """
        total = sum(each.on_host * each.times for each in plan.partitions)
        numel = plan.largest_chunk
        is_read = self.rule.slots(plan.source) > 1 or not y_replaces_gradient(plan)
        is_beside = plan.copies is Copies.BESIDE_STEP and not is_read
        return numel if is_beside and SLOTS_OF_CHUNKS * numel < total else 0

    def drafts(self, places: Places, host_share: float) -> dict[Partitions, ZenFlowPlan]:
        """The draft of each distinct tuple of partitions: most ranks have equal ones."""
        shapes = {rank.partitions for rank in self.facts.ranks}
        return {shape: self.draft(shape, places, host_share) for shape in shapes}

    # -- when weights arrive -----------------------------------------------------------------------

    def wait(self, places: Places) -> Wait:
        """When weights that arrive are complete: exact ones, and those that the host predicts for
        an accelerator. At stages 1 and 2 a parameter may be read between step and forward without
        any call that could wait; at stage 3 it is gathered first."""
        predicted = self.rule.estimates and places.copies is Copies.WEIGHTS
        given = self.config.streams or predicted
        return Wait.FORWARD if given and self.facts.caller.partitions_weights else Wait.STEP

    @property
    def peeks(self) -> bool:
        """Whether the worker computes exact weights before it steps: not where it shares its cores
        with the forward that would hide the steps."""
        return self.config.streams and not self.facts.is_on_cpu

    @property
    def may_stream(self) -> bool:
        """Whether the exact rule takes the place of a rule that is not given: where gradients leave
        in backward and weights are gathered before they are used. There exact weights arrive during
        the forward, as predicted ones would, which need a second slot for every gradient."""
        config, caller = self.config, self.facts.caller
        asked = config.gradients_on_host
        return (
            config.update_rule is None
            and not self.rule.limits
            and config.overlapped
            and not self.facts.is_on_cpu
            and caller.partitions_weights
            and caller.takes_gradients
            and caller.weights is Place.ACCELERATOR
            and (self.tightest is not None if asked is None else asked)
        )

    # -- what steps on the accelerator -------------------------------------------------------------

    def share(self, ratio: Ratio) -> _Share:
        """How much of each partition steps on the host: as given, measured later, or as little as
        fits beside what the accelerators hold."""
        layout = self.facts.layout
        if not layout.steps_on_accelerator:
            return _Share(1.0, f"{layout.name} steps on the host")
        if ratio is not None and ratio != "auto":
            there = self.facts.caller.weights is Place.HOST
            why = "offload_param keeps the weights on the host" if there else "the config says so"
            return _Share(ratio, why)
        if ratio is None and not self.may_share:
            return _Share(1.0, self.rule.limits or "the config gives no other")
        if self.facts.is_on_cpu:
            return _Share(1.0, "the CPU is the accelerator")
        is_short = self.host_shortage(_ON_ACCELERATOR, 1.0) is not None
        is_late = self.config.streams and self.facts.caller.partitions_weights  # none waits
        if self.config.autotune and not (self.rule.limits or is_late or is_short):
            why = f"until {times.MEASURED_STEPS} steps have been measured, the host steps all of it"
            return _Share(1.0, why, is_measured=True)
        on_host, room = self.share_that_fits()
        if ratio == "auto":
            return _Share(on_host, room)
        why = "a host has no memory for all of it"
        if self.host_shortage(_ON_ACCELERATOR, on_host) is None:
            return _Share(on_host, f"{why}; {room}")
        return _Share(1.0, f"{why}, and accelerators have none for the rest")

    @property
    def may_share(self) -> bool:
        """Whether a share may be chosen although the config does not ask for one.

        Steps must overlap: otherwise a run must equal ZeRO-Offload's, and a share's last bits may
        differ. The model must be spread over data-parallel ranks alone: other ranks hold copies of
        parameters at other places, and would step them differently.
        """
        facts, rule, config = self.facts, self.rule, self.config
        return (
            config.autotune
            and rule.overlapped
            and not rule.limits
            and not config.gradients_on_host
            and len(facts.ranks) == facts.caller.ranks
            and not facts.is_on_cpu
            and facts.caller.weights is Place.ACCELERATOR
        )

    def share_that_fits(self) -> tuple[float, str]:
        """The smallest share on the host that the accelerators' free memory before the first step
        allows, and how much there is."""
        drafts, fraction = self.drafts(_BESIDE, 1.0), self.config.offload_reserve_fraction

        def least(rank: RankFacts) -> int:
            draft = drafts[rank.partitions]
            reserve = round((rank.accelerator_total or 0) * fraction)
            room = (rank.accelerator_free or 0) - self._later(rank.partitions) - reserve
            return times.least_units(draft, room - times.accelerator_bytes(draft))

        units, at = max((least(rank), at) for at, rank in enumerate(self.facts.ranks))
        rank = self.facts.ranks[at]
        return units / times.UNITS, (
            f"of {rank.accelerator_total or 0:,} bytes of accelerator memory "
            f"{rank.accelerator_free or 0:,} were free, gradients will take "
            f"{self._later(rank.partitions):,}, and {fraction:.0%} stay free for activations "
            "(zenflow.offload_reserve_fraction)"
        )

    # -- where gradients wait ----------------------------------------------------------------------

    def gradients(self, share: _Share) -> tuple[Places, str]:
        """Where gradients wait for their step, and the places that follow."""
        caller, asked = self.facts.caller, self.config.gradients_on_host
        if self.facts.is_on_cpu and caller.weights is Place.ACCELERATOR:
            why = "the CPU is the accelerator, so all memory is the host's"
            return EVERYTHING_ON_HOST, f"gradients: {why}"
        if caller.weights is Place.HOST:
            leave, why = True, "offload_param keeps the weights on the host"
        elif not caller.takes_gradients:
            leave, why = False, "at this stage a rank keeps gradients of other partitions"
        elif asked is not None:
            leave, why = asked, "the config says so"
        elif share.on_host != 1.0:
            leave, why = False, "what steps on the accelerator needs its gradients there"
        else:
            leave, why = self._gradients_by_memory()
        places = replace(_IN_BACKWARD, weights=caller.weights) if leave else _ON_ACCELERATOR
        return places, f"zenflow.gradients_on_host = {leave}: {why}"

    def _gradients_by_memory(self) -> tuple[bool, str]:
        """Whether accelerators have no room for gradients, and the host has."""
        tightest, short = self.tightest, None
        rank = tightest or self.facts.ranks[0]
        free = "unknown" if rank.accelerator_free is None else f"{rank.accelerator_free:,}"
        why = (
            f"they would take {self._gradient_bytes(rank.partitions):,} bytes of the accelerator, "
            f"where {free} are free, and should take at most "
            f"{MOST_FOR_GRADIENTS:.0%} of what is free on any rank"
        )
        if tightest is not None:
            short = self.host_shortage(_IN_BACKWARD, 1.0)
            why = why if short is None else f"{why}; but a host is short: {short}"
        return tightest is not None and short is None, why

    @cached_property
    def tightest(self) -> RankFacts | None:
        """The first rank whose accelerator has no room for gradients. Landing buffers would not fit
        beside gradients that take too much of an accelerator."""
        for rank in self.facts.ranks:
            free = math.inf if rank.accelerator_free is None else rank.accelerator_free
            if self._gradient_bytes(rank.partitions) > MOST_FOR_GRADIENTS * free:
                return rank
        return None

    def _gradient_bytes(self, partitions: Partitions) -> int:
        """Bytes of accelerator memory that gradients take if they stay there until their step: all
        that DeepSpeed keeps, and the flat copy of one partition."""
        caller = self.facts.caller
        names = caller.weights_dtype, caller.summed_dtype, caller.gradient_dtype
        weights, summed, handed_over = (DTYPE_BYTES[name] for name in names)
        largest = max((run.numel for run in partitions), default=0)
        copied = summed * largest if caller.partitions_weights or summed == weights else 0
        converted = handed_over * largest if handed_over != summed else 0
        # without that, a rank keeps other ranks' gradients, too, until they are reduced
        total = sum(run.numel * run.times for run in partitions)
        kept = summed * total * (1 if caller.takes_gradients else caller.ranks)
        return kept + copied + converted

    def _later(self, partitions: Partitions) -> int:
        """Bytes of the accelerator that gradients will take; at the start there are none."""
        return self._gradient_bytes(partitions) + self.facts.caller.bucket_bytes

    # -- copies beside the step --------------------------------------------------------------------

    def landing(self, places: Places, host_share: float) -> tuple[Places, str]:
        """Whether y lands on the accelerator beside the next step."""
        inside = f"copies {Copies.INSIDE_STEP.value}"
        if places.copies is not Copies.INSIDE_STEP:
            return places, "no copies of gradients and y: the host computes the weights"
        if self.peeks:
            return places, f"{inside}: exact weights are copied to where they are used"
        if self.facts.refuses_landing:
            return places, f"{inside}: a rank could not allocate the landing buffers"
        drafts = self.drafts(_BESIDE, host_share)
        missing = max(
            drafts[rank.partitions].landing_bytes
            + drafts[rank.partitions].head_bytes
            + self._later(rank.partitions)
            + math.ceil((rank.accelerator_total or 0) * LEAST_FREE)
            - (math.inf if rank.accelerator_free is None else rank.accelerator_free)
            for rank in self.facts.ranks
        )
        why = (
            f"landing buffers take {max(each.landing_bytes for each in drafts.values()):,} bytes "
            f"of device memory, and beside them {LEAST_FREE:.0%} must stay free on any rank"
        )
        if missing > 0:
            return places, f"{inside}: {why}: {missing:,} bytes are missing"
        return _BESIDE, f"copies {Copies.BESIDE_STEP.value}: {why}"

    # -- the host ----------------------------------------------------------------------------------

    def host_shortage(self, places: Places, host_share: float) -> str | None:
        """Describe what the first host that is short of memory lacks if its ranks touch all that
        they need at start; None: no host is short."""
        drafts = self.drafts(places, host_share)
        needs = {
            shape: sum(spec.nbytes * plan.times_of(spec) for spec in plan.arena if spec.touched)
            for shape, plan in drafts.items()
        }
        by_limit: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for rank in self.facts.ranks:
            for limit, free in rank.host_free:
                by_limit.setdefault((rank.host, limit), []).append((needs[rank.partitions], free))
        for found in by_limit.values():
            needed, available = sum(need for need, _ in found), min(free for _, free in found)
            if needed > max(0, available):
                return (
                    f"{needed:,} bytes of host memory for {counted(len(found), 'rank')} on one "
                    f"host, but {max(0, available):,} are available"
                )
        return None
