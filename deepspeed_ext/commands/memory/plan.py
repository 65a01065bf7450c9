"""Adds up what ZenFlow's plan and DeepSpeed hold in one run, by phase.

DeepSpeed's bytes, around ZenFlow or with its own optimizers, are formulas of four terms: weights,
gradients, buffers and optimizer. The buffers are those of 0.19.8. In formulas: p, parameters of the
model, `largest` of which are in one; n, elements of this rank's partitions, `most` of them in one;
w and s, bytes of an element of the weights and of an accumulated gradient; 4 and 8, bytes of fp32
and fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from deepspeed_ext.commands.memory.setup import Machine, Model, Run, Setup
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.flatten.plan import TIERS, FlattenFacts, choose_tier, required_bytes
from deepspeed_ext.zenflow.plan.facts import RankFacts
from deepspeed_ext.zenflow.plan.held import (
    Held,
    Holder,
    Memory,
    Moments,
    Part,
    Phase,
    nbytes_of,
    passing,
    peaks,
)
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one run, with ZenFlow's plan if DeepSpeed's own optimizer does not step."""

    model: Model
    machine: Machine
    setup: Setup
    zenflow: ZenFlowPlan | None

    def _peaks(self, place: Place, *, is_first: bool) -> Mapping[Phase, tuple[Part, ...]]:
        holders: list[Holder] = [Zero(self, is_first=is_first)]
        holders += [] if self.zenflow is None else [Held(self.zenflow)]
        return peaks(holders, place)

    @cached_property
    def parts(self) -> Mapping[tuple[Place, Phase], tuple[Part, ...]]:
        """Memory of the job's first rank at the largest moment of a phase, by place and phase. Only
        this rank writes the module in a save."""
        of_places = {place: self._peaks(place, is_first=True) for place in Place}
        return {(place, at): of_places[place][at] for place in Place for at in Phase}

    @cached_property
    def others(self) -> Mapping[Phase, int]:
        """Host bytes of every other rank, by phase."""
        found = self._peaks(Place.HOST, is_first=False)
        return {phase: nbytes_of(parts) for phase, parts in found.items()}

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a rank within a phase."""
        return nbytes_of(self.parts[place, phase])

    def peak(self, place: Place) -> int:
        """Maximum bytes of a rank over all phases."""
        return max(self.nbytes(place, phase) for phase in Phase)

    def page_locked(self, phase: Phase) -> int:
        parts = self.parts[Place.HOST, phase]
        return sum(part.nbytes for part in parts if part.memory.is_page_locked)

    def on_host(self, phase: Phase) -> int:
        """Host bytes of all ranks of the first host within a phase."""
        return self.nbytes(Place.HOST, phase) + (self.machine.per_host - 1) * self.others[phase]

    def host_peak(self) -> int:
        """Maximum host bytes of all ranks of the first host over all phases."""
        return max(map(self.on_host, Phase))


def plan_memory(model: Model, machine: Machine, setup: Setup) -> MemoryPlan:
    """Plan one run. The flatten tier and ZenFlow's decisions are those on this machine, whose
    accelerators hold nothing but the weights.

    Raises:
        ConfigError: the ``zenflow`` section contradicts itself.
    """
    total, mine = machine.gpu_bytes, RankFacts(tuple(setup.partitions(model, machine)))
    if total is not None:
        is_whole = not setup.partitions_weights
        elements = model.params if is_whole else setup.partition_numel(model, machine)
        weights = 0 if setup.weights is Place.HOST else model.itemsize * elements
        of_host = () if machine.host_bytes is None else (("machine", machine.host_bytes),)
        mine = RankFacts(mine.partitions, max(0, total - weights), total, host_free=of_host)
        if setup.flatten_tier is None and is_whole:
            facts = FlattenFacts(weights, machine.ranks, total - weights, total)
            chosen = choose_tier(facts, reserve_fraction=ZeroFields().flatten_reserve_fraction)
            setup = replace(setup, flatten_tier=chosen.tier)
    zenflow = None if setup.zenflow is None else setup.zenflow_plan(model, machine, mine)
    return MemoryPlan(model, machine, setup, zenflow)


def _there(
    weights: int = 0, gradients: int = 0, buffers: int = 0, optimizer: int = 0
) -> list[Part]:
    """The four terms on the accelerator, in bytes."""
    terms = {"weights": weights, "gradients": gradients, "buffers": buffers, "optimizer": optimizer}
    return [Part(kind, nbytes, Memory.ACCELERATOR) for kind, nbytes in terms.items()]


def _here(nbytes: int, kind: str = "buffers", *, locks: bool = False) -> Part:
    return Part(kind, nbytes, Memory.PAGE_LOCKED if locks else Memory.PAGEABLE)


class Zero:
    """DeepSpeed's ZeRO optimizer of one rank, a `Holder`. Only the first one writes the module."""

    def __init__(self, planned: MemoryPlan, *, is_first: bool) -> None:
        model, setup, plan = planned.model, planned.setup, planned.zenflow
        self.setup, self.plan, self.is_first = setup, plan, is_first
        self.ranks, self.p, self.largest = planned.machine.ranks, model.params, model.largest
        self.partitions = setup.partitions(model, planned.machine)
        self.n = setup.partition_numel(model, planned.machine)
        self.most = max(run.numel for run in self.partitions)
        self.w, self.s = model.itemsize, DTYPE_BYTES[setup.accumulation_dtype(model)]
        self.is_whole = not setup.partitions_weights  # a rank has all weights
        self.lifts = setup.weights is Place.HOST  # weights, layer by layer
        self.leaves = plan is not None and plan.places.gradient is Place.HOST  # in backward
        self.on_gpu = plan is None and not setup.offload  # masters and moments

    def held(self, place: Place) -> list[Part]:
        setup, moments = self.setup, 4 * self.n * len(self.setup.layout.moments)
        if place is Place.ACCELERATOR:
            weights, gradients, buffers, masters = self._built()
            return _there(weights, gradients, buffers, masters + self.on_gpu * moments)
        sums = setup.offload * (setup.accumulation > 1) * (setup.stage == 2) * self.w * self.n
        of_sums = _here(sums, "gradients", locks=setup.pins)  # arrays of parameters: not rounded
        return [*self._built_here(), of_sums, _here(setup.offload * moments, "optimizer")]

    def moments(self, place: Place) -> Mapping[Phase, Moments]:
        return self._of_gpu() if place is Place.ACCELERATOR else self._of_host()

    # -- on the accelerator ------------------------------------------------------------------------

    def _built(self) -> tuple[int, int, int, int]:
        """Bytes of weights, gradients, buffers and masters; moments come in the first step."""
        setup, w, n = self.setup, self.w, self.n
        weights = 0 if self.lifts else w * n * (self.ranks if self.is_whole else 1)
        keeps = not self.is_whole and not setup.offload and not self.leaves
        buffers = w * (setup.offload * self.largest if self.is_whole else sum(setup.buckets))
        return weights, keeps * self.s * n, buffers, self.on_gpu * 4 * n

    def _of_gpu(self) -> Mapping[Phase, Moments]:
        setup, w, s, most, whole = self.setup, self.w, self.s, self.most, self.is_whole
        weights, gradients, buffers, masters = self._built()
        first = w * self.largest
        if whole:
            facts = FlattenFacts(weights, self.ranks, weights, weights)
            flattened = required_bytes(setup.flatten_tier or TIERS[0], facts)
            zenflows = (self.plan is not None) * first  # for a moment
            starting = {
                "flattening": _there(weights, buffers=max(flattened, zenflows)),
                "built": _there(weights, 0, buffers + self.on_gpu * 4 * self.n, masters),
            }
        else:  # fp32 on its way to the host, or zeros of the first, empty step
            converts = self.on_gpu or (setup.offload and w != 4 and not self.lifts)
            starting = {
                "built": _there(weights, gradients, buffers + first, masters),
                "first": _there(weights, 0, converts * 4 * most, masters),
            }
        in_backward = self._flat() if whole else self._partitioned()
        found: dict[Phase, Moments] = {
            Phase.START: starting,
            Phase.BACKWARD: {"": _there(0, *in_backward)},
        }
        if not setup.offload and not self.leaves:  # the flat gradient, converted for the optimizer
            handed = 4 if self.plan is None else DTYPE_BYTES[self.plan.gradient_dtype]
            copies = 2 if whole and s == w else 1
            of_torch = self.plan is None and not setup.fused_adam
            converted = handed * most if handed != s else 0
            found[Phase.STEP] = {
                "gather": _there(0, copies * s * most + converted),
                "update": _there(0, handed * most, of_torch * 4 * most),
            }
        if not whole and setup.gathers_on_save:  # layer by layer
            lifted = -(-self.largest // self.ranks) if self.lifts else 0
            found[Phase.SAVE] = {"export": _there(buffers=w * (self.largest + lifted))}
        return found

    def _flat(self) -> tuple[int, int]:
        """Bytes of gradients and buffers in backward, at stages 1 and 2."""
        setup, w, s, largest = self.setup, self.w, self.s, self.largest
        own, filled = s * self.n, min(setup.reduce_bucket_size, self.p)
        across = w * filled if self.ranks > 1 else 0  # a copy of a bucket of several ranks
        if setup.stage == 1 and (not setup.overlaps or setup.accumulation > 1):
            # all gradients stay until the last micro-step; then a bucket's give way to its result
            after = max(across, 8 * largest) if setup.offload else max(own, across)
            after = own + (s + w) * filled if s != w and not setup.offload else after
            return s * self.p, s * sum(setup.buckets) + max(0, after - s * filled)
        fits, earlier = setup.reduce_bucket_size >= self.p, setup.accumulation > 1
        bucket = w * sum(setup.buckets) + (0 if fits else w * largest)
        reduced = w * filled + 4 * largest
        if setup.offload:  # 8: for the norm
            return 0, bucket + max(across, 8 * largest)
        if self.leaves and s == w:
            return 0, bucket + max(across, earlier * s * largest)
        if self.leaves:
            return s * filled, bucket + max(reduced, (earlier * s + w) * largest)
        if s != w:
            return own, bucket + reduced
        return (1 + earlier) * own, bucket + max(0, across - fits * own)

    def _partitioned(self) -> tuple[int, int]:
        """The same at stage 3, which also gathers parameters, in forward as well, and copies
        reduced gradients, for the norm in fp64."""
        setup, w, p = self.setup, self.w, self.p
        filled, each = min(setup.reduce_bucket_size, p), -(-self.largest // self.ranks)
        live = min(p, max(setup.max_live_parameters, setup.max_reuse_distance // 2 + self.largest))
        again = min(setup.max_live_parameters, p - filled)
        copy = 0 if setup.stage3_allgather_single_param else min(setup.prefetch_bucket_size, p)
        if self.ranks == 1 and not self.lifts:  # a partition is its whole parameter
            live = again = copy = 0
        reduced = 0
        if self.leaves and self.lifts and self.s != w:  # one rank's sum is a copy
            reduced = (8 + (8 if self.ranks == 1 else 4) + w) * each
        elif self.s != w:
            reduced = 4 * -(-filled // self.ranks)
        elif setup.offload or self.leaves:
            reduced = ((0 if self.leaves and not self.lifts else 8) + w) * each
        made = w * self.largest + reduced
        return 0, max(w * (live + copy), w * live + made, w * (again + filled) + made)

    # -- on the host -------------------------------------------------------------------------------

    def _array(self, kind: str, nbytes: int, arrays: Sequence[Run], *, locks: bool) -> Part:
        """Arrays of `nbytes` per element, allocated by torch, which page-locks powers of two."""
        sizes = [(nbytes * run.numel, run.times) for run in arrays]
        if locks and self.setup.rounds_pinned:
            sizes = [(1 << (size - 1).bit_length() if size else 0, times) for size, times in sizes]
        return _here(sum(size * times for size, times in sizes), kind, locks=locks)

    def _built_here(self) -> list[Part]:
        """What the host holds from the start: weights, and ZeRO-Offload's masters, gradients and
        buffers."""
        pins, mine, each, whole = self.setup.pins, [Run(self.n)], self.partitions, self.is_whole
        held = [self._array("weights", self.lifts * self.w, mine, locks=True)]
        if self.setup.offload:
            held += [
                self._array("optimizer", 4, each, locks=pins and whole),
                self._array("gradients", 4, each, locks=pins),
                self._array("gradients", 0 if whole else self.s, mine, locks=pins),
                self._array("buffers", whole * self.w, each, locks=pins),
                self._array("buffers", whole * self.w, [Run(self.largest)], locks=pins),
            ]
        return held

    def _of_host(self) -> Mapping[Phase, Moments]:
        setup, w, most, whole, ours = self.setup, self.w, self.most, self.is_whole, self.plan
        built, starting = self._built_here(), dict[str, list[Part]]()
        if not whole:
            starting["defragmentation"] = [_here(w * self.n)]
        elif setup.flatten_tier == "host":  # this rank's slice and two chunks
            starting["flattening"] = [_here(w * self.n), passing(w * most, 2)]
        if ours is not None:
            starting["build"] = built
            starting["buffer"] = [_here(whole * w * self.largest)]
        elif setup.offload:
            converted = 0 if whole else max(setup.pins * w * self.n, 4 * most)
            starting["built"] = [*built, _here(converted)]
            starting["master"] = [*built[:2], passing(w * most, 2)]
        # The first rank writes the module, which DeepSpeed copies to the host first. We copy it in
        # chunks, except what stage 3 gathers.
        module, chunks = _here(w * self.p), passing(w * self.largest)
        saved = chunks if ours is not None and not ours.saves_beside else module
        exported = self.is_first and (whole or setup.gathers_on_save)
        saving = {
            "module": [saved] * (self.is_first and whole),
            "export": [chunks if ours is not None and whole else module] * exported,
            "state": [_here(self.on_gpu * 4 * most)],  # copied tensor by tensor
        }
        # torch's AdamW has two temporaries of a partition's size
        step = {"step": [_here(setup.offload * (not setup.fused_adam) * 2 * 4 * most)]}
        return {Phase.START: starting, Phase.STEP: step, Phase.SAVE: saving}
