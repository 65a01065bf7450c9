"""Computes what ZenFlow holds in memory, by kind and phase, from a plan alone.

A rank's bytes are computed only here. `commands.memory` adds what
DeepSpeed holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArraySpec, plan_layout
from deepspeed_ext.zenflow.plan.chunks import CONVERTED_NUMEL, UPLOAD_NUMEL
from deepspeed_ext.zenflow.plan.phases import Memory, Moments, Part, Phase, nbytes_of, parts_within
from deepspeed_ext.zenflow.plan.places import Copies, Place, Source, Wait
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, ZenFlowPlan, head_of
from deepspeed_ext.zenflow.plan.rule import RuleBytes, head_step_bytes
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES, chunk_of

__all__ = ["Held", "described", "passing"]

_SHARE = "optimizer's share"
_LANDING = "landing buffers"
_ARENA_KINDS = {
    "p": "master",
    "m": "moment m",
    "v": "moment v",
    "m_scales": "scales of m",
    "v_scales": "scales of v",
    "y": "published weights",
    "g": "gradient ring",
    "chunks": "chunks in transit",
    "block_means": "block means",
    "known": "signs and means of blocks",
}
"""Names of the arena's kinds of arrays in a report; "chunks" are gradients and y that pass through
a few slots. Kinds that are not listed take no memory between steps: they show coded moments in
fp32."""

_MOST_PLACED = 32
"""Maximum number of partitions that are placed in the arena one by one."""

_FLOAT_BYTES = 4


def passing(most: int, chunks: int = 1) -> Part:
    """The page-locked chunks through which arrays of up to `most` bytes are copied to the host."""
    return Part("staging", chunks * min(STAGING_CHUNK_BYTES, most), Memory.PAGE_LOCKED)


@dataclass(frozen=True)
class Held:
    """What a rank with this plan holds because of ZenFlow: a `phases.Holder`."""

    plan: ZenFlowPlan

    def parts(self, place: Place, phase: Phase) -> tuple[Part, ...]:
        """What ZenFlow holds at a phase's peak, without what DeepSpeed holds."""
        return parts_within([self], place, phase)

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a phase, without what DeepSpeed holds."""
        return nbytes_of(self.parts(place, phase))

    def held(self, place: Place) -> list[Part]:
        """What is held between steps."""
        return self._on_host() if place is Place.HOST else self._on_accelerator()

    def moments(self, place: Place, phase: Phase) -> Moments:
        """The moments of a phase."""
        by_phase = self._host_moments if place is Place.HOST else self._accelerator_moments
        return by_phase(phase)

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.plan.dtypes.weights]

    @property
    def _numel(self) -> int:
        return sum(each.numel * each.times for each in self.plan.partitions)

    @property
    def _most(self) -> int:
        return max(each.numel for each in self.plan.partitions)

    def _of_rule(self, numel: int) -> RuleBytes:
        return self.plan.rule.nbytes(numel, self._item)

    def _kept(self) -> dict[str, int]:
        """The rule's state, where the weights are computed."""
        kept: dict[str, int] = {}
        for each in self.plan.partitions:
            for kind, nbytes in self._of_rule(each.on_host).kept.items():
                kept[kind] = kept.get(kind, 0) + nbytes * each.times
        return kept

    # -- on the accelerator ------------------------------------------------------------------------

    def _on_accelerator(self) -> list[Part]:
        """Landing buffers, the share of the optimizer and the rule's own state."""
        if not self.plan.computes_there:
            return []
        kept = {_LANDING: self.plan.landing_bytes, _SHARE: self.plan.head_bytes} | self._kept()
        return _parts(kept, Memory.ACCELERATOR)

    def _accelerator_moments(self, phase: Phase) -> Moments:
        if phase is Phase.START:  # the rule's state comes with the first steps
            return {
                "built": [
                    part for part in self._on_accelerator() if part.kind in (_SHARE, _LANDING)
                ]
            }
        if phase is Phase.STEP:
            if self.plan.computes_there:
                return {"update": self._updating(self._most)}
            return {"lift": self._lifting(self._most)}
        if phase is Phase.SAVE and self.plan.computes_there:
            return {"export": [self._aside(Memory.ACCELERATOR)]}
        return {}

    def _updating(self, numel: int) -> list[Part]:
        """Temporaries while a partition of `numel` elements is updated on the accelerator."""
        head = head_of(numel, self.plan.host_share, self.plan.rule.block_size)
        step = self.plan.rule.nbytes(
            numel - head,
            self._item,
            y_bytes=DTYPE_BYTES[self.plan.dtypes.published],
            in_place=self.plan.copies is Copies.BESIDE_STEP,
        ).step
        share = head_step_bytes(head, self.plan.rule.block_size, self.plan.rule.layout)
        return _parts({"temporaries": max(step, share)}, Memory.ACCELERATOR)

    def _lifting(self, numel: int) -> list[Part]:
        """Temporaries while host-computed weights are copied to a partition of `numel` elements on
        the accelerator; none if the weights stay on the host."""
        if self.plan.places.weights is Place.HOST:
            return []
        y = DTYPE_BYTES[self.plan.dtypes.published]
        converted = y * min(numel, CONVERTED_NUMEL) if y != self._item else 0
        return _parts({"temporaries": converted}, Memory.ACCELERATOR)

    def _aside(self, memory: Memory) -> Part:
        """The weights that are not p, set aside while the model is saved with p as its weights;
        none if every step is exact."""
        nbytes = self._item * self._numel if self.plan.rule.overlapped else 0
        return Part("predicted weights, aside", nbytes, memory)

    # -- on the host -------------------------------------------------------------------------------

    def _on_host(self) -> list[Part]:
        """The arena, the rule's state, and what the host keeps to compute weights."""
        kept = sum(
            self._of_rule(each.on_host).kept_on_host * each.times for each in self.plan.partitions
        )
        found = [*self._arena(at_start=False), Part("rule's state", kept, Memory.PAGEABLE)]
        if self.plan.computes_there:
            return found
        found += _parts(self._kept(), Memory.PAGEABLE)
        uploads = self.plan.copies is Copies.WEIGHTS and self.plan.rule.estimates
        numel = min(self._most, chunk_of(UPLOAD_NUMEL, self.plan.rule.block_size)) if uploads else 0
        return [*found, Part("weights on their way", 2 * self._item * numel, Memory.PAGE_LOCKED)]

    def _arena(self, *, at_start: bool) -> list[Part]:
        """The arena's arrays, in whole pages; `at_start` those that the worker touches then."""
        exchanged = {"g", "y", "chunks"}
        if (per_block := self.plan.kinds.per_block) is not None and per_block.exchanged:
            exchanged |= {"block_means", "known"}
        if not self.plan.computes_there:
            weights = self.plan.places.weights
            exchanged = {"g"} if weights is Place.HOST else {"g", "y"}
        return [
            Part(
                _ARENA_KINDS[kind], size, Memory.LOCKED_ARENA if kind in exchanged else Memory.ARENA
            )
            for kind, size in (self._touched_pages if at_start else self._pages).items()
        ]

    @cached_property
    def _pages(self) -> dict[str, int]:
        """Bytes of the arena's pages by kind, once all of them are touched."""
        return self._page_bytes(at_start=False)

    @cached_property
    def _touched_pages(self) -> dict[str, int]:
        """Those that the worker touches at start."""
        return self._page_bytes(at_start=True)

    def _page_bytes(self, *, at_start: bool) -> dict[str, int]:
        nbytes = dict.fromkeys(_ARENA_KINDS, 0)
        for specs, count in self._laid_out():
            touched = {spec.key: spec.touched or not at_start for spec in specs}
            for key, size in plan_layout(specs).page_bytes().items():
                kind = "chunks" if key.partition == OF_CHUNKS else key.kind
                if kind in _ARENA_KINDS and touched[key]:
                    nbytes[kind] += size * count
        return nbytes

    def _laid_out(self) -> Iterator[tuple[list[ArraySpec], int]]:
        """Groups of arrays that are placed together, and the number of such groups. Exact for up to
        `_MOST_PLACED` partitions. With more, each counts like the first; its arrays may lie on one
        page more or less."""
        if sum(each.times for each in self.plan.partitions) <= _MOST_PLACED:
            every = [each for each in self.plan.partitions for _ in range(each.times)]
            yield [*self._specs(every), *self.plan.slots()], 1
            return
        for each in self.plan.partitions:
            yield self._specs([each]), each.times
        yield list(self.plan.slots()), 1

    def _specs(self, partitions: Iterable[PartitionPlan]) -> list[ArraySpec]:
        found = (
            self.plan.kinds.of(at, each.on_host, each.head) for at, each in enumerate(partitions)
        )
        return [spec for specs in found for spec in specs]

    def _host_moments(self, phase: Phase) -> Moments:
        if phase is Phase.START:
            return self._starting()
        if phase is Phase.STEP:
            return {"step": [self._computing()]}
        if phase is Phase.SAVE:
            return self._saving()
        return {}

    def _starting(self) -> Moments:
        """p is copied from weights that are on the accelerator, through two chunks."""
        arena, places = self._arena(at_start=True), self.plan.places
        most = max(each.on_host for each in self.plan.partitions)
        is_there = places.weights is Place.ACCELERATOR
        return {
            "build": [*arena, *([passing(self._item * most, 2)] if is_there else [])],
            "sums": arena,
        }

    def _computing(self) -> Part:
        """Temporaries of a step of the rule that runs on the host beside the worker."""
        here = self.plan.rule.steps_beside_worker and not self.plan.computes_there
        step = self._of_rule(self._most).step if here else 0
        return Part("temporaries", step, Memory.PAGEABLE)

    # -- while it saves and loads ------------------------------------------------------------------

    def _saving(self) -> Moments:
        """The accelerator's share is shown all the time. An export sets predicted weights
        aside."""
        shown, aside = self._shown(), self._aside(Memory.PAGEABLE)
        found = {"export": [shown] if self.plan.computes_there else [shown, aside]}
        if self.plan.saves_beside:  # what is not in the arena is copied, until it is written
            weights = self._item * self._numel if self.plan.caller.partitions_weights else 0
            copies = {
                "copy of the rule's state": sum(
                    sum(self._of_rule(each.on_host).saved) * each.times
                    for each in self.plan.partitions
                ),
                "copy of the weights": weights,
            }
            return found | {"module": [shown, *_parts(copies, Memory.PAGEABLE)]}
        tensors = [shown, passing(self._most_saved())]
        return found | {"module": [shown], "state": tensors}

    def _most_saved(self) -> int:
        """Bytes of the largest tensor of the accelerator in the saved state."""
        if self.plan.places.weights is Place.HOST:
            return 0
        saved = [
            size for each in self.plan.partitions for size in self._of_rule(each.on_host).saved
        ]
        weights = self._item * self._most if self.plan.caller.partitions_weights else 0
        return max([*(saved if self.plan.computes_there else []), weights])

    def _shown(self) -> Part:
        """The accelerator's share, shown on the host."""
        return Part("shown state", self.plan.head_bytes, Memory.ARENA)


def _parts(nbytes: Mapping[str, int], memory: Memory) -> list[Part]:
    return [Part(kind, size, memory) for kind, size in nbytes.items()]


def described(plan: ZenFlowPlan, rule: str, warm_up_steps: int) -> Iterator[str]:
    """A few lines for the log: what runs where, what waits for what, and how much memory it takes.

    Args:
        rule: the update rule that the config asks for.
        warm_up_steps: synchronous steps at the start.
    """
    layout = plan.rule.layout
    is_rounded = layout.moment_dtype != "float32"
    how = f", moments in {layout.moment_dtype} (not exact)" if is_rounded else ""
    yield (
        f"{layout.name.capitalize()} runs in a process of its own, one per rank; "
        f"{'exact' if plan.streams else rule} rule{how}"
    )
    if plan.rule.overlapped:
        first = (
            "step waits for its" if warm_up_steps == 1 else f"{warm_up_steps} steps wait for their"
        )
        yield f"the first {first} own update; updates of later steps overlap with the next step"
    elif plan.wait is Wait.FORWARD:
        yield "exact weights arrive during the next forward"
    elif plan.peeks:
        yield "every step waits for its exact weights, and not for p and the moments"
    else:
        yield "every step waits for its own update"
    if plan.source is Source.BACKWARD:
        computes = "" if plan.peeks else ", and the host computes the weights"
        yield f"gradients go to the host during backward{computes}"
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
