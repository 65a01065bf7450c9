"""Decides everything about a run: a pure function from facts and config to the plan.

Decisions in order: where gradients may wait, how much steps on the accelerator, whether copies may
run beside the next step, whether gradients and y pass through the host in chunks. Each sees those
before it, and the memory of all ranks. If several answers fit, `search` takes the one predicted to
be fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime.words import counted
from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.arrays import (
    ArraySpec,
    Dtypes,
    bytes_at_start,
    slot_arrays,
    weight_slots,
)
from deepspeed_ext.zenflow.plan.chunks import Chunks, chunk_numel
from deepspeed_ext.zenflow.plan.facts import RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.partitions import (
    PartitionPlan,
    head_of,
    kinds_of,
    landing_bytes,
    share_bytes,
)
from deepspeed_ext.zenflow.plan.places import (
    EVERYTHING_ON_HOST,
    Arrival,
    Copies,
    Place,
    Places,
    WeightsArrival,
)
from deepspeed_ext.zenflow.plan.plan import Reason, ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.plan.rules import settings_of
from deepspeed_ext.zenflow.plan.search import Option, expected_times, search
from deepspeed_ext.zenflow.plan.share import MEASURED_STEPS, UNITS, share_reason
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["decide"]

MOST_FOR_GRADIENTS = 0.5
"""Fraction of the accelerator's free memory that gradients may take."""

LEAST_FREE = 0.1
"""Fraction of the accelerator's memory that must stay free beside landing buffers."""

Partitions = tuple[Run, ...]
_BESIDE = "copies beside the next step"
_ON_ACCELERATOR = Places(
    Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST, Place.HOST, Arrival.AFTER_Y
)
_IN_BACKWARD = Places(Place.ACCELERATOR, Place.HOST, Place.HOST, Place.HOST, Arrival.IN_BACKWARD)


def decide(
    facts: ZenFlowFacts,
    config: ZenFlowConfig,
    *,
    host_share: float | None = 1.0,
    is_asked: bool = True,
    steps_per_epoch: int | None = None,
) -> ZenFlowPlan:
    """The plan of a run: of those that fit, the one predicted to be fastest.

    Args:
        config: the ``zenflow`` section.
        host_share: the fraction of each partition that steps on the host
            (``offload_optimizer.ratio``); None: all of it until steps are measured (`plan.share`),
            or as little as the accelerators' free memory allows if the rule has no steps to
            measure, `autotune` is off or a host is too small.
        is_asked: whether the config asks for a chosen share (``"auto"``). Otherwise `host_share`
            None means 1, unless a share is harmless (`_Choice.may_share`).
        steps_per_epoch: optimizer steps per epoch; None: unknown.

    Raises:
        ConfigError: the section contradicts itself.
    """
    caller = facts.caller
    dtypes = Dtypes.of(caller.weights_dtype, caller.summed_dtype)
    layout = replace(facts.layout, moment_dtype=config.state_dtype)
    rule = settings_of(config, layout, steps_per_epoch)
    choice = _Choice(facts, config, rule, dtypes)
    if choice.wants_stream:
        streamed = choice.streamed().made(host_share, is_asked=is_asked)
        if streamed.places.gradient is Place.HOST:
            return streamed
    return choice.made(host_share, is_asked=is_asked)


@dataclass(frozen=True)
class _Choice:
    """Makes the decisions, one per method."""

    facts: ZenFlowFacts
    config: ZenFlowConfig
    rule: RuleSettings
    dtypes: Dtypes

    def made(self, wanted_share: float | None, *, is_asked: bool) -> ZenFlowPlan:
        """Make all decisions, in order, and take the fastest plan that fits."""
        wanted_share, why = self.known_share(wanted_share, is_asked=is_asked)
        measures = self.measures_share(wanted_share)
        plans = []
        for places, of_gradients in self.gradients(1.0 if measures else wanted_share):
            stays = measures and places.gradient is Place.HOST
            host_share, of_share = (
                self.share(1.0, "gradients wait on the host, where they arrive in backward")
                if stays
                else self.share(wanted_share, why)
            )
            for landed, of_copies in self.landing(places, host_share):
                reasons = *self.stays(), of_gradients, of_share, of_copies
                plans.append(
                    self._plan(landed, host_share, reasons, measures and not stays, is_asked)
                )
        times = zip(plans, expected_times(plans), strict=True)
        return search(
            [Option(plan, plan.host_share, plan.host_share, (each,)) for plan, each in times]
        ).plan

    def _plan(
        self,
        places: Places,
        host_share: float,
        reasons: tuple[Reason, ...],
        measures: bool,
        is_asked: bool,
    ) -> ZenFlowPlan:
        """The plan with these decisions."""
        mine = self.facts.mine.partitions
        found, of_chunks = self.chunks(mine, places, host_share)
        shortage = self._host_shortage(places, host_share)
        if found is not None and found.slots:
            places = replace(places, handed_over=Place.IN_TRANSIT)
        partitions = tuple(
            PartitionPlan(run.numel, self._head(run.numel, host_share), places, run.times)
            for run in mine
        )
        if shortage is not None:
            instead = (
                "set zenflow.gradients_on_host to false, or "
                if places.copies is Copies.WEIGHTS
                else ""
            )
            shortage = (
                f"the optimizer's state needs {shortage}: {instead}use more hosts or more memory"
            )
        rule = self.rule
        weights_arrive, of_weights = self.weights()
        if (
            measures
            and is_asked  # so the warm-up may be prolonged until enough steps are measured
            and isinstance(rule, PredictiveSettings)
            and rule.warm_up_steps is not None
        ):
            rule = replace(rule, warm_up_steps=max(rule.warm_up_steps, MEASURED_STEPS + 2))
        return ZenFlowPlan(
            rule=rule,
            dtypes=self.dtypes,
            partitions=partitions,
            host_share=host_share,
            chunks=found,
            shortage=shortage,
            reasons=(*reasons, of_weights, of_chunks),
            caller=self.facts.caller,
            measures_share=measures,
            cpus=self.facts.mine.cpus,
            saves_beside=self.config.async_save,
            weights_arrive=weights_arrive,
            peeks=self.peeks,
        )

    # -- the rule ----------------------------------------------------------------------------------

    def stays(self) -> tuple[Reason, ...]:
        """Why the run keeps this plan, if its rule leaves nothing to move."""
        return (Reason("the plan stays", self.rule.limits),) if self.rule.limits else ()

    # -- when weights arrive -----------------------------------------------------------------------

    def weights(self) -> tuple[WeightsArrival, Reason]:
        """When exact weights are complete. At stages 1 and 2 a parameter may be read between step
        and forward without any call that could wait; at stage 3 it is gathered first."""
        if not self.config.arrives_late:
            return _arriving(WeightsArrival.IN_STEP, "steps predict their weights, or wait")
        if not self.facts.caller.partitions_weights:
            why = "at stages 1 and 2 a parameter may be read without a call that could wait"
            return _arriving(WeightsArrival.IN_STEP, why)
        why = "at stage 3 weights are gathered before they are read"
        return _arriving(WeightsArrival.IN_FORWARD, why)

    @property
    def wants_stream(self) -> bool:
        """Whether the exact rule takes the place of a rule that is not given: where gradients leave
        in backward and weights are gathered before they are used. There a predicted step would send
        all weights up before it returns, and needs a second slot for every gradient; exact weights
        arrive during the forward."""
        config, caller = self.config, self.facts.caller
        is_open = config.rule == "predictive" and config.update_rule is None
        asked = config.gradients_on_host
        leaves = bool(self.tight) if asked is None else asked
        return (
            is_open
            and config.overlapped
            and leaves
            and not self.facts.is_on_cpu
            and caller.partitions_weights
            and caller.takes_gradients
            and caller.weights is Place.ACCELERATOR
        )

    def streamed(self) -> _Choice:
        """The same choice under the exact rule."""
        exact = self.config.model_copy(update={"update_rule": "exact"})
        return replace(self, config=exact, rule=settings_of(exact, self.rule.layout))

    @property
    def peeks(self) -> bool:
        """Whether the worker computes exact weights before it steps: not where it shares its cores
        with the forward that would hide the steps."""
        return self.config.arrives_late and not self.facts.is_on_cpu

    # -- where gradients wait ----------------------------------------------------------------------

    def gradients(self, host_share: float | None) -> list[tuple[Places, Reason]]:
        """Where gradients may wait for their step, and the places that follow."""
        if self.facts.is_on_cpu and self.facts.caller.weights is Place.ACCELERATOR:
            why = "the CPU is the accelerator, so all memory is the host's"
            return [(EVERYTHING_ON_HOST, Reason("gradients", why))]
        on_host = replace(_IN_BACKWARD, weights=self.facts.caller.weights)
        places = {True: on_host, False: _ON_ACCELERATOR}
        name = "zenflow.gradients_on_host"
        return [
            (places[answer], Reason(f"{name} = {answer}", why))
            for answer, why in self._gradients_on_host(host_share)
        ]

    def _gradients_on_host(self, host_share: float | None) -> list[tuple[bool, str]]:
        """Whether gradients may go to the host during backward, and why: one answer, or both."""
        caller, wanted = self.facts.caller, self.config.gradients_on_host
        if caller.weights is Place.HOST:
            return [(True, "offload_param keeps the weights on the host")]
        if not caller.takes_gradients:
            return [(False, "at this stage a rank keeps gradients of other partitions")]
        if wanted is not None:
            return [(wanted, "the config says so")]
        if host_share != 1.0:
            return [(False, "what steps on the accelerator needs its gradients there")]
        return self._gradients_by_memory()

    @property
    def tight(self) -> list[RankFacts]:
        """The ranks whose accelerators have no room for gradients. Landing buffers would not fit
        beside gradients that take too much of an accelerator."""
        needs = self._by_shape(self._gradient_bytes)
        return [
            rank
            for rank in self.facts.ranks
            if rank.accelerator_free is not None
            and needs[rank.partitions] > MOST_FOR_GRADIENTS * rank.accelerator_free
        ]

    def _gradients_by_memory(self) -> list[tuple[bool, str]]:
        """Whether accelerators have room for gradients; if not, the host takes them if it has."""
        needs, tight = self._by_shape(self._gradient_bytes), self.tight
        rank = (tight or self.facts.ranks)[0]
        free = "unknown" if rank.accelerator_free is None else f"{rank.accelerator_free:,}"
        why = (
            f"they would take {needs[rank.partitions]:,} bytes of the accelerator, "
            f"where {free} are free, and should take at most "
            f"{MOST_FOR_GRADIENTS:.0%} of what is free on any rank"
        )
        sums = DTYPE_BYTES[self.dtypes.summed] if self.dtypes.sums_apart else 0
        short = self._host_shortage(_IN_BACKWARD, 1.0, sums)
        if short is not None:
            return [(False, f"{why}; but a host is short: {short}" if tight else why)]
        if tight:
            return [(True, why)]
        return [(False, why), (True, why)]

    def _gradient_bytes(self, partitions: Partitions) -> int:
        """Bytes of accelerator memory that gradients take if they stay there until their step: all
        that DeepSpeed keeps, and the flat copy of one partition."""
        names = self.dtypes.weights, self.dtypes.summed, self.dtypes.gradient
        weights, summed, handed_over = (DTYPE_BYTES[name] for name in names)
        largest = max((run.numel for run in partitions), default=0)
        copied = (
            summed * largest if self.facts.caller.partitions_weights or summed == weights else 0
        )
        converted = handed_over * largest if handed_over != summed else 0
        kept = summed * _total(partitions) * self.facts.caller.kept_partitions
        return kept + copied + converted

    # -- what steps on the accelerator -------------------------------------------------------------

    def known_share(self, given: float | None, *, is_asked: bool) -> tuple[float | None, str]:
        """The fraction of each partition that steps on the host, if it follows from the config or
        from a host that is short of memory, and why; None: it is chosen or measured."""
        if not self.facts.layout.counts_updates:
            return 1.0, f"{self.facts.layout.name} steps on the host"
        if given is not None or is_asked:
            there = self.facts.caller.weights is Place.HOST
            why = "offload_param keeps the weights on the host" if there else "the config says so"
            return given, why
        if not self.may_share():
            return 1.0, "the config gives no other"
        if self.measures_share(given):
            return None, ""
        share, fits = self.share_that_fits()
        if self._host_shortage(_ON_ACCELERATOR, share) is None:
            return share, f"a host has no memory for all of it; {fits.why}"
        return 1.0, "a host has no memory for all of it, and accelerators have none for the rest"

    def share(self, wanted: float | None, why: str) -> tuple[float, Reason]:
        """The fraction of each partition that steps on the host; `wanted`, if it is known, because
        of `why`."""
        if wanted is not None:
            return wanted, share_reason(wanted, why)
        if self.facts.is_on_cpu:
            return 1.0, share_reason(1.0, "the CPU is the accelerator")
        if self.measures_share(wanted):
            why = f"until {MEASURED_STEPS} steps have been measured, the host steps all of it"
            return 1.0, share_reason(1.0, why, is_open=True)
        return self.share_that_fits()

    def measures_share(self, wanted: float | None) -> bool:
        """Whether the share on the accelerator is chosen by measuring steps: the first must be
        complete when they return, and hosts need room for the whole optimizer until then."""
        if wanted is not None or self.facts.is_on_cpu or not self.config.autotune:
            return False
        arrives, _ = self.weights()
        if self.rule.limits or arrives is WeightsArrival.IN_FORWARD:
            return False
        return self._host_shortage(_ON_ACCELERATOR, 1.0) is None

    def may_share(self) -> bool:
        """Whether a share may be chosen although the config does not ask for one.

        Steps must overlap: otherwise a run must equal ZeRO-Offload's, and a share's last bits may
        differ. The model must be spread over data-parallel ranks alone: other ranks hold copies of
        parameters at other places, and would step them differently.
        """
        facts, rule, config = self.facts, self.rule, self.config
        return (
            config.autotune
            and isinstance(rule, PredictiveSettings)
            and rule.overlapped
            and not config.gradients_on_host
            and len(facts.ranks) == facts.caller.ranks
            and not facts.is_on_cpu
            and facts.caller.weights is Place.ACCELERATOR
        )

    def share_that_fits(self) -> tuple[float, Reason]:
        """The smallest share on the host that the accelerators' free memory before the first step
        allows."""
        units, tightest = min((self._units(rank), at) for at, rank in enumerate(self.facts.ranks))
        rank, share = self.facts.ranks[tightest], 1.0 - units / UNITS
        why = (
            f"of {rank.accelerator_total or 0:,} bytes of accelerator memory "
            f"{rank.accelerator_free or 0:,} were free, gradients will take "
            f"{self._later(rank.partitions):,}, and {self.config.offload_reserve_fraction:.0%} "
            "stay free for activations (zenflow.offload_reserve_fraction)"
        )
        return share, share_reason(share, why, is_open=True)

    def _units(self, rank: RankFacts) -> int:
        """The largest share of a rank's optimizer that fits on its accelerator, of `UNITS`; 0 if
        none fits. An element takes more bytes there if it steps there."""
        reserve = round((rank.accelerator_total or 0) * self.config.offload_reserve_fraction)
        room = (rank.accelerator_free or 0) - self._later(rank.partitions) - reserve
        units = range(UNITS + 1)
        fitting = bisect_right(
            units, room, key=lambda u: self._bytes_at(rank.partitions, 1.0 - u / UNITS)
        )
        return max(fitting - 1, 0)

    def _later(self, partitions: Partitions) -> int:
        """Bytes of the accelerator that gradients will take; at the start there are none."""
        return self._gradient_bytes(partitions) + self.facts.caller.bucket_bytes

    def _bytes_at(self, partitions: Partitions, host_share: float) -> int:
        """Bytes of the accelerator for its share of the optimizer, and for the rest of the
        partitions: the rule's state and, if copies may run beside the step, landing buffers."""
        nbytes = self._share_bytes(partitions, host_share)
        for run in self._on_host(partitions, host_share):
            kept = self.rule.nbytes(run.numel, DTYPE_BYTES[self.dtypes.weights]).kept
            nbytes += sum(kept.values()) * run.times
        return nbytes + self._landing_bytes(partitions, _ON_ACCELERATOR, host_share)

    def _share_bytes(self, partitions: Partitions, host_share: float) -> int:
        return sum(
            share_bytes(self.rule, self._head(run.numel, host_share)) * run.times
            for run in partitions
        )

    def _head(self, numel: int, host_share: float) -> int:
        return head_of(numel, host_share, self.rule.block_size)

    def _on_host(self, partitions: Partitions, host_share: float) -> list[Run]:
        return [Run(run.numel - self._head(run.numel, host_share), run.times) for run in partitions]

    # -- copies beside the step --------------------------------------------------------------------

    def landing(self, places: Places, host_share: float) -> list[tuple[Places, Reason]]:
        """Whether y may land on the accelerator beside the next step: one answer, or both."""
        inside = "copies inside the step"
        if places.copies is not Copies.INSIDE_STEP:
            return [
                (
                    places,
                    _of_copies("no copies of gradients and y", "the host computes the weights"),
                )
            ]
        if self.peeks:
            return [(places, _of_copies(inside, "exact weights are copied to where they are used"))]
        beside = replace(places, published=Place.ACCELERATOR)
        if self.facts.refuses_landing:
            return [(places, _of_copies(inside, "a rank could not allocate the landing buffers"))]
        needs = self._by_shape(partial(self._landing_bytes, places=places, host_share=host_share))
        missing = {
            needs[rank.partitions] - self._left(rank, host_share)
            for rank in self.facts.ranks
            if rank.accelerator_free is not None
        }
        why = (
            f"landing buffers take {max(needs.values()):,} bytes of device memory, and beside them "
            f"{LEAST_FREE:.0%} must stay free on any rank"
        )
        if (most := max(missing, default=0)) > 0:
            return [(places, _of_copies(inside, f"{why}: {most:,} bytes are missing"))]
        return [(beside, _of_copies(_BESIDE, why)), (places, _of_copies(inside, why))]

    def _landing_bytes(self, partitions: Partitions, places: Places, host_share: float) -> int:
        kinds = kinds_of(self.rule, self.dtypes, places)
        found = self._on_host(partitions, host_share)
        return sum(landing_bytes(kinds, run.numel) * run.times for run in found)

    def _left(self, rank: RankFacts, host_share: float) -> int:
        """Bytes of a rank's accelerator left for landing buffers, after gradients, its share of the
        optimizer and what must stay free."""
        free, total = rank.accelerator_free or 0, rank.accelerator_total or 0
        taken = self._later(rank.partitions) + self._share_bytes(rank.partitions, host_share)
        return free - taken - math.ceil(total * LEAST_FREE)

    def chunks(
        self, partitions: Partitions, places: Places, host_share: float
    ) -> tuple[Chunks | None, Reason]:
        """The chunks of copies beside the step, and whether they share a few slots on the host.

        Chunks may reuse slots if no gradient or y is read on the host after its chunk has been
        stepped and sent back; if y fits in its gradient's place; and if slots take less memory
        than whole gradients.
        """
        name = "gradients on the host"
        if places.copies is not Copies.BESIDE_STEP:
            return None, Reason(name, "whole, because none are copied beside the step")
        size, block_size = self._on_host(partitions, host_share), self.rule.block_size
        numel, largest = _total(size), max((run.numel for run in size), default=0)
        whole = Chunks(block_size, chunk_numel(numel, block_size))
        if self.rule.slots(places.arrival) > 1:
            return whole, Reason(name, "whole, because the next one comes before y is read")
        if not self.dtypes.y_replaces_gradient:
            return whole, Reason(name, "whole, because y does not fit into their place")
        slot_numel = min(whole.numel, largest)
        if chunks.SLOTS_OF_CHUNKS * slot_numel >= numel:
            return whole, Reason(name, "whole, because slots for chunks would take as much")
        slots = replace(whole, slots=chunks.SLOTS_OF_CHUNKS, slot_numel=slot_numel)
        return slots, Reason(name, f"in {slots.slots} slots, which chunks take in turn")

    # -- the host ----------------------------------------------------------------------------------

    def _host_shortage(self, places: Places, host_share: float, sums: int = 0) -> str | None:
        """Describe what the first host that is short of memory lacks if its ranks touch all that
        they need at start; None: no host is short.

        Args:
            sums: bytes per element of gradient sums that are on the host, too.
        """
        needs = self._by_shape(
            partial(self._host_bytes, places=places, host_share=host_share, sums=sums)
        )
        sharers: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for rank in self.facts.ranks:
            for limit, free in rank.host_free:
                sharers.setdefault((rank.host, limit), []).append((needs[rank.partitions], free))
        for found in sharers.values():
            needed, available = sum(need for need, _ in found), min(free for _, free in found)
            if needed > max(0, available):
                return (
                    f"{needed:,} bytes of host memory for {counted(len(found), 'rank')} on one "
                    f"host, but {max(0, available):,} are available"
                )
        return None

    def _host_bytes(
        self, partitions: Partitions, places: Places, host_share: float, sums: int
    ) -> int:
        """Bytes that a rank touches on its host at start."""
        found, _ = self.chunks(partitions, places, host_share)
        slots: list[ArraySpec] = []
        if found is not None and found.slots:
            slots = slot_arrays(found.slots, found.slot_numel, self.dtypes)
            places = replace(places, handed_over=Place.IN_TRANSIT)
        kinds = kinds_of(self.rule, self.dtypes, places)
        runs = self._on_host(partitions, host_share)
        if self.peeks:
            most = max((run.numel for run in runs), default=0)
            slots = weight_slots(_total(runs), most, self.rule.block_size, self.dtypes)
        arrays = sum(bytes_at_start(kinds.of(0, run.numel)) * run.times for run in runs)
        return arrays + bytes_at_start(slots) + sums * _total(partitions)

    def _by_shape(self, function: Callable[[Partitions], int]) -> dict[Partitions, int]:
        """`function` of each distinct tuple of partitions: most ranks have equal ones."""
        return {shape: function(shape) for shape in {rank.partitions for rank in self.facts.ranks}}


def _total(partitions: Sequence[Run]) -> int:
    return sum(run.numel * run.times for run in partitions)


def _of_copies(decision: str, why: str) -> Reason:
    return Reason(decision, why, about="copies")


def _arriving(arrives: WeightsArrival, why: str) -> tuple[WeightsArrival, Reason]:
    return arrives, Reason(f"weights arrive {arrives.value}", why)
