"""Decides everything about a run: a pure function from facts and config to the plan.

Decisions in order: how much steps on the accelerator, where gradients may wait, whether copies may
run beside the next step, whether gradients and y pass through the host in chunks. Each sees those
before it, and the memory of all ranks: it drafts the plan that each rank would have, and asks that
for its bytes. If several answers fit, the one predicted to be fastest is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.zenflow.plan.arrays import Dtypes
from deepspeed_ext.zenflow.plan.chunks import SLOTS_OF_CHUNKS, Chunks, chunk_numel
from deepspeed_ext.zenflow.plan.facts import RankFacts, Ratio, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.held import Held
from deepspeed_ext.zenflow.plan.lanes import Speeds, lanes_of
from deepspeed_ext.zenflow.plan.phases import nbytes_of
from deepspeed_ext.zenflow.plan.places import (
    EVERYTHING_ON_HOST,
    Copies,
    Place,
    Places,
    Source,
    Wait,
)
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, Reason, ZenFlowPlan, head_of
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.plan.rules import settings_of
from deepspeed_ext.zenflow.plan.share import (
    HIDDEN,
    LEAST_GAINED,
    MEASURED_STEPS,
    UNITS,
    share_reason,
)
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["decide"]

MOST_FOR_GRADIENTS = 0.5
"""Fraction of the accelerator's free memory that gradients may take."""

LEAST_FREE = 0.1
"""Fraction of the accelerator's memory that must stay free beside landing buffers."""

TYPICAL = Speeds(link=20e9, host=100e9)
"""Assumed for a rank with an accelerator. Only their ratio matters."""

Partitions = tuple[Run, ...]
_ON_ACCELERATOR = Places(Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST, Place.HOST, Source.COPY)
_IN_BACKWARD = Places(Place.ACCELERATOR, Place.HOST, Place.HOST, Place.HOST, Source.BACKWARD)


def decide(
    facts: ZenFlowFacts,
    config: ZenFlowConfig,
    *,
    ratio: Ratio = 1.0,
    steps_per_epoch: int | None = None,
) -> ZenFlowPlan:
    """The plan of a run: of those that fit, the one predicted to be fastest.

    Args:
        config: the ``zenflow`` section.
        ratio: the fraction of each partition that steps on the host. "auto": all of it until steps
            are measured (`plan.share`), or as little as the accelerators' free memory allows if the
            rule has no steps to measure, `autotune` is off or a host is too small. None: 1, unless
            a share is harmless (`_Planner.may_share`).
        steps_per_epoch: optimizer steps per epoch; None: unknown.

    Raises:
        ConfigError: the section contradicts itself.
    """
    planner = _Planner.of(facts, config, steps_per_epoch)
    if planner.may_stream:
        exact = config.model_copy(update={"update_rule": "exact"})
        streamed = _Planner.of(facts, exact).best(ratio)
        if streamed.places.gradient is Place.HOST:
            return streamed
    return planner.best(ratio)


@dataclass(frozen=True)
class _Share:
    """How much of each partition steps on the host, and why."""

    on_host: float
    why: str
    is_open: bool = False
    """Whether the config left it to be decided."""
    is_measured: bool = False
    """Whether it is chosen anew once steps are measured."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay where a part steps, or would if there were room."""
        return self.on_host != 1.0 or (self.is_open and not self.is_measured)

    @property
    def reason(self) -> Reason:
        return share_reason(self.on_host, self.why, is_open=self.is_open)


@dataclass(frozen=True)
class _Planner:
    """Makes the decisions, one per method."""

    facts: ZenFlowFacts
    config: ZenFlowConfig
    rule: RuleSettings
    dtypes: Dtypes

    @classmethod
    def of(
        cls, facts: ZenFlowFacts, config: ZenFlowConfig, steps_per_epoch: int | None = None
    ) -> _Planner:
        """The planner of a config."""
        dtypes = Dtypes.of(facts.caller.weights_dtype, facts.caller.summed_dtype)
        layout = replace(facts.layout, moment_dtype=config.state_dtype)
        return cls(facts, config, settings_of(config, layout, steps_per_epoch), dtypes)

    def best(self, ratio: Ratio) -> ZenFlowPlan:
        """Make all decisions, in order, and take the fastest plan that fits."""
        chosen, plans = self.share(ratio), []
        stays = [Reason("the plan stays", self.rule.limits)] if self.rule.limits else []
        for places, of_gradients in self.gradients(chosen):
            share = chosen
            if share.is_measured and places.gradient is Place.HOST:
                share = _Share(1.0, "gradients wait on the host, where they arrive in backward")
            for landed, of_copies in self.landing(places, share.on_host):
                reasons = *stays, of_gradients, share.reason, of_copies, self.wait[1]
                plans.append(self.plan(landed, share, reasons))
        return _fastest(plans)

    def plan(self, places: Places, share: _Share, reasons: tuple[Reason, ...]) -> ZenFlowPlan:
        """The plan with these decisions."""
        mine = self.facts.mine
        draft = self.draft(mine.partitions, places, share.on_host)
        shortage = self.host_shortage(places, share.on_host)
        if shortage is not None:
            other = "set zenflow.gradients_on_host to false, or "
            instead = other if places.copies is Copies.WEIGHTS else ""
            shortage = (
                f"the optimizer's state needs {shortage}: {instead}use more hosts or more memory"
            )
        return replace(
            draft,
            shortage=shortage,
            reasons=(*reasons, self.chunks(mine.partitions, places, share.on_host)[1]),
            measures_share=share.is_measured,
            cpus=mine.cpus,
        )

    def draft(self, partitions: Partitions, places: Places, host_share: float) -> ZenFlowPlan:
        """The plan of a rank with these partitions, without reasons: what its bytes follow from."""
        chunks, _ = self.chunks(partitions, places, host_share)
        if chunks is not None and chunks.slots:
            places = replace(places, handed_over=Place.IN_TRANSIT)
        return ZenFlowPlan(
            rule=self.rule,
            dtypes=self.dtypes,
            partitions=tuple(
                PartitionPlan(run.numel, self._head(run.numel, host_share), run.times)
                for run in partitions
            ),
            places=places,
            host_share=host_share,
            chunks=chunks,
            shortage=None,
            reasons=(),
            caller=self.facts.caller,
            saves_beside=self.config.async_save,
            wait=self.wait[0],
            peeks=self.peeks,
        )

    def _head(self, numel: int, host_share: float) -> int:
        return head_of(numel, host_share, self.rule.block_size)

    def _by_shape(self, function: Callable[[Partitions], int]) -> dict[Partitions, int]:
        """`function` of each distinct tuple of partitions: most ranks have equal ones."""
        return {shape: function(shape) for shape in {rank.partitions for rank in self.facts.ranks}}

    # -- when weights arrive -----------------------------------------------------------------------

    @property
    def wait(self) -> tuple[Wait, Reason]:
        """When exact weights are complete. At stages 1 and 2 a parameter may be read between step
        and forward without any call that could wait; at stage 3 it is gathered first."""
        wait, why = Wait.STEP, "steps predict their weights, or wait"
        if self.config.streams and self.facts.caller.partitions_weights:
            wait = Wait.FORWARD
            why = "at stage 3 weights are gathered before they are read"
        elif self.config.streams:
            why = "at stages 1 and 2 a parameter may be read without a call that could wait"
        return wait, Reason(f"weights arrive {wait.value}", why)

    @property
    def peeks(self) -> bool:
        """Whether the worker computes exact weights before it steps: not where it shares its cores
        with the forward that would hide the steps."""
        return self.config.streams and not self.facts.is_on_cpu

    @property
    def may_stream(self) -> bool:
        """Whether the exact rule takes the place of a rule that is not given: where gradients leave
        in backward and weights are gathered before they are used. There a predicted step would send
        all weights up before it returns, and needs a second slot for every gradient; exact weights
        arrive during the forward."""
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
            and (bool(self._tight) if asked is None else asked)
        )

    # -- what steps on the accelerator -------------------------------------------------------------

    def share(self, ratio: Ratio) -> _Share:
        """How much of each partition steps on the host: as given, measured later, or as little as
        fits beside what the accelerators hold."""
        layout = self.facts.layout
        if not layout.counts_updates:
            return _Share(1.0, f"{layout.name} steps on the host")
        is_asked = ratio == "auto"
        if ratio is not None and ratio != "auto":
            there = self.facts.caller.weights is Place.HOST
            why = "offload_param keeps the weights on the host" if there else "the config says so"
            return _Share(ratio, why)
        if not (is_asked or self.may_share):
            return _Share(1.0, "the config gives no other")
        if self.facts.is_on_cpu:
            return _Share(1.0, "the CPU is the accelerator")
        is_short = self.host_shortage(_ON_ACCELERATOR, 1.0) is not None
        is_late = self.wait[0] is Wait.FORWARD  # so no step is synchronous
        if self.config.autotune and not (self.rule.limits or is_late or is_short):
            why = f"until {MEASURED_STEPS} steps have been measured, the host steps all of it"
            return _Share(1.0, why, is_open=True, is_measured=True)
        fits = self.share_that_fits()
        if is_asked:
            return fits
        why = "a host has no memory for all of it"
        if self.host_shortage(_ON_ACCELERATOR, fits.on_host) is None:
            return _Share(fits.on_host, f"{why}; {fits.why}")
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

    def share_that_fits(self) -> _Share:
        """The smallest share on the host that the accelerators' free memory before the first step
        allows."""
        units, tightest = min((self._units(rank), at) for at, rank in enumerate(self.facts.ranks))
        rank = self.facts.ranks[tightest]
        why = (
            f"of {rank.accelerator_total or 0:,} bytes of accelerator memory "
            f"{rank.accelerator_free or 0:,} were free, gradients will take "
            f"{self._later(rank.partitions):,}, and {self.config.offload_reserve_fraction:.0%} "
            "stay free for activations (zenflow.offload_reserve_fraction)"
        )
        return _Share(1.0 - units / UNITS, why, is_open=True)

    def _units(self, rank: RankFacts) -> int:
        """The largest share of a rank's optimizer that fits on its accelerator, of `UNITS`; 0 if
        none fits. An element takes more bytes there if it steps there."""
        reserve = round((rank.accelerator_total or 0) * self.config.offload_reserve_fraction)
        room = (rank.accelerator_free or 0) - self._later(rank.partitions) - reserve

        def taken(units: int) -> int:
            """Bytes of the share, of landing buffers and of the rule's state."""
            beside = _beside(_ON_ACCELERATOR)
            draft = self.draft(rank.partitions, beside, 1.0 - units / UNITS)
            return nbytes_of(Held(draft).held(Place.ACCELERATOR))

        return max(bisect_right(range(UNITS + 1), room, key=taken) - 1, 0)

    # -- where gradients wait ----------------------------------------------------------------------

    def gradients(self, share: _Share) -> list[tuple[Places, Reason]]:
        """Where gradients may wait for their step, and the places that follow: one answer, or both.
        They may go to the host during backward."""
        caller, asked = self.facts.caller, self.config.gradients_on_host
        if self.facts.is_on_cpu and caller.weights is Place.ACCELERATOR:
            why = "the CPU is the accelerator, so all memory is the host's"
            return [(EVERYTHING_ON_HOST, Reason("gradients", why))]
        if caller.weights is Place.HOST:
            found = [(True, "offload_param keeps the weights on the host")]
        elif not caller.takes_gradients:
            found = [(False, "at this stage a rank keeps gradients of other partitions")]
        elif asked is not None:
            found = [(asked, "the config says so")]
        elif share.keeps_gradients:
            found = [(False, "what steps on the accelerator needs its gradients there")]
        else:
            found = self._gradients_by_memory()
        places = {True: replace(_IN_BACKWARD, weights=caller.weights), False: _ON_ACCELERATOR}
        return [
            (places[answer], Reason(f"zenflow.gradients_on_host = {answer}", why))
            for answer, why in found
        ]

    def _gradients_by_memory(self) -> list[tuple[bool, str]]:
        """Whether accelerators have room for gradients; if not, the host takes them if it has."""
        tight = self._tight
        rank = (tight or self.facts.ranks)[0]
        free = "unknown" if rank.accelerator_free is None else f"{rank.accelerator_free:,}"
        why = (
            f"they would take {self._gradient_bytes(rank.partitions):,} bytes of the accelerator, "
            f"where {free} are free, and should take at most "
            f"{MOST_FOR_GRADIENTS:.0%} of what is free on any rank"
        )
        sums = DTYPE_BYTES[self.dtypes.summed] if self.dtypes.sums_apart else 0
        short = self.host_shortage(_IN_BACKWARD, 1.0, sums)
        if short is not None:
            return [(False, f"{why}; but a host is short: {short}" if tight else why)]
        return [(True, why)] if tight else [(False, why), (True, why)]

    @property
    def _tight(self) -> list[RankFacts]:
        """The ranks whose accelerators have no room for gradients. Landing buffers would not fit
        beside gradients that take too much of an accelerator."""
        needs = self._by_shape(self._gradient_bytes)
        return [
            rank
            for rank in self.facts.ranks
            if rank.accelerator_free is not None
            and needs[rank.partitions] > MOST_FOR_GRADIENTS * rank.accelerator_free
        ]

    def _gradient_bytes(self, partitions: Partitions) -> int:
        """Bytes of accelerator memory that gradients take if they stay there until their step: all
        that DeepSpeed keeps, and the flat copy of one partition."""
        names = self.dtypes.weights, self.dtypes.summed, self.dtypes.gradient
        weights, summed, handed_over = (DTYPE_BYTES[name] for name in names)
        largest = max((run.numel for run in partitions), default=0)
        is_copied = self.facts.caller.partitions_weights or summed == weights
        copied = summed * largest if is_copied else 0
        converted = handed_over * largest if handed_over != summed else 0
        kept = summed * _total(partitions) * self.facts.caller.kept_partitions
        return kept + copied + converted

    def _later(self, partitions: Partitions) -> int:
        """Bytes of the accelerator that gradients will take; at the start there are none."""
        return self._gradient_bytes(partitions) + self.facts.caller.bucket_bytes

    # -- copies beside the step --------------------------------------------------------------------

    def landing(self, places: Places, host_share: float) -> Iterator[tuple[Places, Reason]]:
        """Whether y may land on the accelerator beside the next step: one answer, or both."""
        beside, inside = (each.value for each in (Copies.BESIDE_STEP, Copies.INSIDE_STEP))
        if places.copies is not Copies.INSIDE_STEP:
            decision, why = "no copies of gradients and y", "the host computes the weights"
        elif self.peeks:
            decision, why = f"copies {inside}", "exact weights are copied to where they are used"
        elif self.facts.refuses_landing:
            decision, why = f"copies {inside}", "a rank could not allocate the landing buffers"
        else:
            needed, missing = self._landing_bytes(places, host_share)
            decision, why = (
                f"copies {inside}",
                (
                    f"landing buffers take {needed:,} bytes of device memory, and beside them "
                    f"{LEAST_FREE:.0%} must stay free on any rank"
                ),
            )
            if missing > 0:
                why = f"{why}: {missing:,} bytes are missing"
            else:
                yield _beside(places), Reason(f"copies {beside}", why)
        yield places, Reason(decision, why)

    def _landing_bytes(self, places: Places, host_share: float) -> tuple[int, int]:
        """The most bytes that landing buffers take on a rank, and the most that are missing for
        them after gradients, a rank's share of the optimizer and what must stay free."""
        shapes = {rank.partitions for rank in self.facts.ranks}
        drafts = {shape: self.draft(shape, _beside(places), host_share) for shape in shapes}
        missing = [
            drafts[rank.partitions].landing_bytes
            + drafts[rank.partitions].head_bytes
            + self._later(rank.partitions)
            + math.ceil((rank.accelerator_total or 0) * LEAST_FREE)
            - rank.accelerator_free
            for rank in self.facts.ranks
            if rank.accelerator_free is not None
        ]
        return max(each.landing_bytes for each in drafts.values()), max(missing, default=0)

    def chunks(
        self, partitions: Partitions, places: Places, host_share: float
    ) -> tuple[Chunks | None, Reason]:
        """The chunks of copies beside the step, and whether they share a few slots on the host.

        Chunks may reuse slots if no gradient or y is read on the host after its chunk has been
        stepped and sent back; if y fits in its gradient's place; and if slots take less memory than
        whole gradients.
        """
        name = "gradients on the host"
        if places.copies is not Copies.BESIDE_STEP:
            return None, Reason(name, "whole, because none are copied beside the step")
        sizes = [(run.numel - self._head(run.numel, host_share), run.times) for run in partitions]
        numel = sum(on_host * times for on_host, times in sizes)
        largest = max((on_host for on_host, _ in sizes), default=0)
        whole = Chunks(self.rule.block_size, chunk_numel(numel, self.rule.block_size))
        if self.rule.slots(places.source) > 1:
            return whole, Reason(name, "whole, because the next one comes before y is read")
        if not self.dtypes.y_replaces_gradient:
            return whole, Reason(name, "whole, because y does not fit into their place")
        slot_numel = min(whole.numel, largest)
        if SLOTS_OF_CHUNKS * slot_numel >= numel:
            return whole, Reason(name, "whole, because slots for chunks would take as much")
        slots = replace(whole, slots=SLOTS_OF_CHUNKS, slot_numel=slot_numel)
        return slots, Reason(name, f"in {slots.slots} slots, which chunks take in turn")

    # -- the host ----------------------------------------------------------------------------------

    def host_shortage(self, places: Places, host_share: float, sums: int = 0) -> str | None:
        """Describe what the first host that is short of memory lacks if its ranks touch all that
        they need at start; None: no host is short.

        Args:
            sums: bytes per element of gradient sums that are on the host, too.
        """
        needs = self._by_shape(
            lambda shape: (
                self.draft(shape, places, host_share).bytes_at_start + sums * _total(shape)
            )
        )
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


def _total(partitions: Partitions) -> int:
    return sum(run.numel * run.times for run in partitions)


def _beside(places: Places) -> Places:
    """`places` with copies beside the next step."""
    return replace(places, published=Place.ACCELERATOR)


def _fastest(plans: list[ZenFlowPlan]) -> ZenFlowPlan:
    """The plan whose steps wait least at `TYPICAL` speeds, if the accelerator's step is just long
    enough to hide the slowest; an earlier one unless a later one gains `LEAST_GAINED`."""
    lanes = [lanes_of(plan, TYPICAL) for plan in plans]
    device = max(each.beside for each in lanes) / HIDDEN
    best, least = plans[0], device + lanes[0].exposed
    for plan, each in zip(plans, lanes, strict=True):
        if device + each.exposed < (1.0 - LEAST_GAINED) * least:
            best, least = plan, device + each.exposed
    return best
