"""Says what ZenFlow holds in memory: one table of what, how many bytes, where, and when, from a
plan alone. `commands.memory` adds what DeepSpeed holds."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS
from deepspeed_ext.zenflow.plan.places import Copies, Place, Source, Wait
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import RuleBytes
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES


class Phase(enum.Enum):
    START = "start-up"
    """From a built module to the end of ``deepspeed.initialize``."""
    BETWEEN = "between steps"
    """What is held all the time."""
    BACKWARD = "forward and backward"
    STEP = "optimizer step"
    SAVE = "save"
    """Of a checkpoint, and of the model alone."""

    @property
    def keeps(self) -> bool:
        """Whether what is held between steps is also held during it."""
        return self is not Phase.START


class Memory(enum.Enum):
    ACCELERATOR = "accelerator"
    PAGEABLE = "host, pageable"
    PAGE_LOCKED = "host, page-locked"
    """It cannot be swapped, and the accelerator reaches it directly."""
    ARENA = "host, arena"
    """A memfd that a rank and its optimizer process share."""
    LOCKED_ARENA = "host, arena, page-locked"

    @property
    def place(self) -> Place:
        return Place.ACCELERATOR if self is Memory.ACCELERATOR else Place.HOST

    @property
    def is_page_locked(self) -> bool:
        return self in (Memory.PAGE_LOCKED, Memory.LOCKED_ARENA)


@dataclass(frozen=True)
class Part:
    """What one rank holds of one `kind`, such as "master"."""

    kind: str
    nbytes: int
    memory: Memory


Moments = Mapping[str, Sequence[Part]]
"""By name, what is held at moments of one phase. Equal names mean the same moment."""


class Holder(Protocol):
    """Holds memory during a run: ZenFlow, or DeepSpeed around it."""

    def held(self, place: Place) -> Sequence[Part]:
        """What it holds between steps."""

    def moments(self, place: Place) -> Mapping[Phase, Moments]:
        """What it holds in addition or, in phases that do not keep `held`, instead."""


def peaks(holders: Sequence[Holder], place: Place) -> Mapping[Phase, tuple[Part, ...]]:
    """What `holders` hold together at each phase's peak, without empty parts; those of one kind and
    memory are one."""
    held = [part for holder in holders for part in holder.held(place)]
    found = [holder.moments(place) for holder in holders]
    return {
        phase: _peak(held if phase.keeps else [], [each.get(phase, {}) for each in found])
        for phase in Phase
    }


def _peak(held: Sequence[Part], found: Sequence[Moments]) -> tuple[Part, ...]:
    names = dict.fromkeys(chain(*found)) or [""]
    moments = ([*held, *chain(*(each.get(name, ()) for each in found))] for name in names)
    kinds: dict[tuple[str, Memory], int] = {}
    for part in max(moments, key=nbytes_of):
        if part.nbytes:
            kinds[part.kind, part.memory] = kinds.get((part.kind, part.memory), 0) + part.nbytes
    return tuple(Part(kind, nbytes, memory) for (kind, memory), nbytes in kinds.items())


def nbytes_of(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)


Row = tuple[Part, Sequence[tuple[Phase, str]]]
"""Memory, and the phases and moments (`Moments`) in which it is held."""

_HELD = Phase.BETWEEN, ""


def passing(most: int, chunks: int = 1) -> Part:
    """The page-locked chunks through which arrays of up to `most` bytes are copied to the host."""
    return Part("staging", chunks * min(STAGING_CHUNK_BYTES, most), Memory.PAGE_LOCKED)


@dataclass(frozen=True)
class Held:
    """What a rank with this plan holds because of ZenFlow: a `Holder`."""

    plan: ZenFlowPlan

    def parts(self, place: Place, phase: Phase) -> tuple[Part, ...]:
        """What ZenFlow holds at a phase's peak."""
        return peaks([self], place)[phase]

    def nbytes(self, place: Place, phase: Phase) -> int:
        return nbytes_of(self.parts(place, phase))

    def held(self, place: Place) -> list[Part]:
        return [part for part, when in self._rows(place) if _HELD in when]

    def moments(self, place: Place) -> Mapping[Phase, Moments]:
        found: dict[Phase, dict[str, list[Part]]] = {}
        for part, when in self._rows(place):
            for phase, moment in when:
                if (phase, moment) != _HELD:
                    found.setdefault(phase, {}).setdefault(moment, []).append(part)
        return found

    def _rows(self, place: Place) -> Iterator[Row]:
        """The table. State of the rule, its temporaries and weights that an export sets aside are
        where the weights are computed."""
        is_there = place is Place.ACCELERATOR
        yield from self._built_there() if is_there else self._built_here()
        memory = Memory.ACCELERATOR if is_there else Memory.PAGEABLE
        moment = "update" if is_there else "step"
        if self.plan.computes_there is not is_there:
            weights, state = self._of_rule(self._largest).crossing
            weights *= self.plan.places.weights is Place.ACCELERATOR
            part = Part("hot blocks on their way", weights if is_there else state, memory)
            yield part, [(Phase.STEP, moment)]
            return
        for each in self.plan.partitions:
            for kind, nbytes in self._of_rule(each).kept.items():
                yield Part(kind, nbytes * each.times, memory), [_HELD]
        aside = self._item * self._numel if self.plan.rule.overlapped else 0
        yield Part("temporaries", self._step_bytes, memory), [(Phase.STEP, moment)]
        yield Part("predicted weights, aside", aside, memory), [(Phase.SAVE, "export")]

    def _built_there(self) -> Iterator[Row]:
        parts = {"landing buffers": self.plan.landing_bytes}
        for kind, nbytes in (parts | {"optimizer's share": self.plan.head_bytes}).items():
            yield Part(kind, nbytes, Memory.ACCELERATOR), [_HELD, (Phase.START, "built")]

    def _built_here(self) -> Iterator[Row]:
        """The arena, and what passes through the host. p is copied from weights on the accelerator
        through two chunks. A save shows the accelerator's share all the time."""
        plan, item = self.plan, self._item
        for part in self._arena():
            yield part, [_HELD, (Phase.START, "build"), (Phase.START, "sums")]
        if plan.places.weights is Place.ACCELERATOR:
            most = max(each.on_host for each in plan.partitions)
            yield passing(item * most, 2), [(Phase.START, "build")]
        if plan.predicts_in_chunks:
            nbytes = 2 * item * plan.largest_chunk
            yield Part("weights on their way", nbytes, Memory.PAGE_LOCKED), [_HELD]
        moments = ("export", "module") if plan.saves_beside else ("export", "module", "state")
        shown = Part("shown state", plan.head_bytes, Memory.ARENA)
        yield shown, [(Phase.SAVE, moment) for moment in moments]
        weights = item if plan.caller.partitions_weights else 0
        if plan.saves_beside:  # what is not in the arena is copied, until it is written
            saved = sum(sum(self._of_rule(each).saved) * each.times for each in plan.partitions)
            for kind, size in {"rule's state": saved, "weights": weights * self._numel}.items():
                yield Part(f"copy of the {kind}", size, Memory.PAGEABLE), [(Phase.SAVE, "module")]
        elif plan.places.weights is Place.ACCELERATOR:
            sizes = [size for each in plan.partitions for size in self._of_rule(each).saved]
            most = max([*(sizes if plan.computes_there else []), weights * self._largest.numel])
            yield passing(most), [(Phase.SAVE, "state")]

    def _arena(self) -> Iterator[Part]:
        """The arena's arrays, in whole pages; moments that are shown take none between steps."""
        layout = self.plan.rule.layout
        names = {"p": "master", "g": "gradient ring", "y": "published weights"}
        names |= {kind: f"moment {kind}" for kind in layout.kinds[1:]}
        names |= {
            scales: f"scales of {kind}"
            for kind, scales in zip(layout.kinds[1:], layout.scales, strict=False)
        }
        names[layout.per_block[0]] = layout.per_block[0].replace("_", " ")
        pages = self.plan.layout.page_bytes()
        for spec in self.plan.arena:
            if spec.kind in names:
                kind = "chunks in transit" if spec.partition == OF_CHUNKS else names[spec.kind]
                memory = Memory.LOCKED_ARENA if spec.exchanged else Memory.ARENA
                yield Part(kind, pages[spec.key] * self.plan.times_of(spec), memory)

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.plan.caller.weights_dtype]

    @property
    def _numel(self) -> int:
        return sum(each.numel * each.times for each in self.plan.partitions)

    @property
    def _largest(self) -> PartitionPlan:
        return max(self.plan.partitions, key=lambda each: each.numel)

    def _of_rule(self, partition: PartitionPlan) -> RuleBytes:
        lands = self.plan.copies is Copies.BESIDE_STEP
        gradient = DTYPE_BYTES[self.plan.gradient_dtype]
        return self.plan.rule.nbytes(partition.on_host, self._item, gradient, in_place=lands)

    @property
    def _step_bytes(self) -> int:
        """Maximum temporaries while a partition is updated; the worker's take no memory."""
        rule, largest = self.plan.rule, self._largest
        if not self.plan.computes_there and not rule.steps_beside_worker:
            return 0
        share = rule.layout.step_bytes(largest.head, rule.block_size)
        return max(self._of_rule(largest).step, share)


def described(plan: ZenFlowPlan, rule: str, warm_up_steps: int) -> Iterator[str]:
    """A few lines for the log: what runs where, what waits for what, and how much memory it takes.

    Args:
        rule: the update rule that the config asks for.
        warm_up_steps: synchronous steps at the start.
    """
    layout, in_forward = plan.rule.layout, plan.wait is Wait.FORWARD
    is_exact = plan.peeks or (in_forward and not plan.rule.overlapped)
    how = f", {layout.rounding} (not exact)" if layout.rounding else ""
    yield (
        f"{layout.name.capitalize()} runs in a process of its own, one per rank; "
        f"{'exact' if is_exact else rule} rule{how}"
    )
    if plan.rule.overlapped:
        first = (
            "step waits for its" if warm_up_steps == 1 else f"{warm_up_steps} steps wait for their"
        )
        yield f"the first {first} own update; updates of later steps overlap with the next step"
    elif in_forward:
        yield "exact weights arrive during the next forward"
    elif plan.peeks:
        yield "every step waits for its exact weights, and not for p and the moments"
    else:
        yield "every step waits for its own update"
    if plan.source is Source.BACKWARD:
        computes = "" if plan.peeks else ", and the host computes the weights"
        when = ", which arrive during the next forward" if computes and in_forward else ""
        yield f"gradients go to the host during backward{computes}{when}"
    elif plan.copies is not Copies.NONE:
        yield f"gradients and results are copied {plan.copies.value}"
    held, there = Held(plan), Place.ACCELERATOR
    here = held.parts(Place.HOST, Phase.BETWEEN)
    locked = nbytes_of([part for part in here if part.memory.is_page_locked])
    sizes = nbytes_of(here), locked, *(held.nbytes(there, at) for at in (Phase.BETWEEN, Phase.STEP))
    host, of_it, between, step = (f"{size / 2**20:,.1f} MiB" for size in sizes)
    yield (
        f"a rank holds {host} of the host, {of_it} of it page-locked, and {between} of the "
        f"accelerator, {step} in a step"
    )
