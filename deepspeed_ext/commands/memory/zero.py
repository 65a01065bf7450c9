"""Computes what DeepSpeed holds, around ZenFlow or with its own optimizers, as four terms: weights,
gradients, buffers and optimizer. Pure functions; the buffers are those of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.adapter.buffers import NORM_BYTES
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Run, Setup
from deepspeed_ext.flatten.plan import TIERS, FlattenFacts, required_bytes
from deepspeed_ext.zenflow.plan.held import passing
from deepspeed_ext.zenflow.plan.phases import Memory, Moments, Part, Phase
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["Zero"]


def _there(
    weights: int = 0, gradients: int = 0, buffers: int = 0, optimizer: int = 0
) -> list[Part]:
    """The four terms on the accelerator, in bytes."""
    terms = {"weights": weights, "gradients": gradients, "buffers": buffers, "optimizer": optimizer}
    return [Part(kind, nbytes, Memory.ACCELERATOR) for kind, nbytes in terms.items()]


def _buffers(nbytes: int) -> Part:
    return Part("buffers", nbytes, Memory.PAGEABLE)


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ZeRO optimizer of one rank: a `phases.Holder`.

    Attributes:
        plan: ZenFlow's plan; None: DeepSpeed's own optimizer steps.
        is_first: whether this is the job's first rank, which alone writes the module.
        partitions: this rank's partitions.
        mine, most: elements of all of them, and of the largest one.
        item, summed: bytes of an element of the weights, and of an accumulated gradient.
        filled: elements of a reduction bucket that are filled.
    """

    setup: Setup
    plan: ZenFlowPlan | None
    is_first: bool
    ranks: int
    params: int
    largest: int
    partitions: Sequence[Run]
    mine: int
    most: int
    item: int
    summed: int
    filled: int

    @classmethod
    def of(
        cls, model: Model, ranks: Ranks, setup: Setup, plan: ZenFlowPlan | None, *, is_first: bool
    ) -> Zero:
        """DeepSpeed's optimizer in a run."""
        runs = setup.partitions(model, ranks)
        mine, most = sum(run.numel * run.times for run in runs), max(run.numel for run in runs)
        summed = DTYPE_BYTES[setup.accumulation_dtype(model)]
        filled = min(setup.reduce_bucket_size, model.params)
        sizes = (ranks.count, model.params, model.largest, runs, mine, most)
        return cls(setup, plan, is_first, *sizes, model.itemsize, summed, filled)

    def held(self, place: Place) -> list[Part]:
        """What is held between steps."""
        if place is Place.HOST:
            return self._on_host(at_start=False)
        moments = self._on_gpu * FLOAT_BYTES * self.mine * len(self.setup.layout.moments)
        weights, gradients, buffers, master = self._on_accelerator()
        return _there(weights, gradients, buffers, master + moments)

    def moments(self, place: Place, phase: Phase) -> Moments:
        """The moments of a phase."""
        found = {
            (Place.HOST, Phase.START): self._starting_on_host,
            (Place.HOST, Phase.STEP): self._step_on_host,
            (Place.HOST, Phase.SAVE): self._saving,
            (Place.ACCELERATOR, Phase.START): self._starting,
            (Place.ACCELERATOR, Phase.BACKWARD): self._backward,
            (Place.ACCELERATOR, Phase.STEP): self._step,
            (Place.ACCELERATOR, Phase.SAVE): self._gathering,
        }.get((place, phase))
        return {} if found is None else found()

    @property
    def _is_whole(self) -> bool:
        """Stages 1 and 2, where each rank has all weights."""
        return not self.setup.partitions_weights

    @property
    def _weights_on_host(self) -> bool:
        return self.setup.weights is Place.HOST

    @property
    def _on_gpu(self) -> bool:
        return self.setup.on_accelerator

    @property
    def _leaves(self) -> bool:
        """Whether gradients go to ZenFlow during backward."""
        return self.plan is not None and self.plan.places.gradient is Place.HOST

    @property
    def _sums_apart(self) -> bool:
        return self.plan is not None and self._leaves and self.plan.dtypes.sums_apart

    # -- on the accelerator ------------------------------------------------------------------------

    def _on_accelerator(self) -> tuple[int, int, int, int]:
        """Weights, gradients, buffers and masters; moments are allocated in the first step."""
        item, whole = self.item, self._is_whole
        weights = 0 if self._weights_on_host else item * self.mine * (self.ranks if whole else 1)
        kept = not whole and not self.setup.offload and not self._leaves
        buffers = item * (self.setup.offload * self.largest if whole else self.setup.bucket)
        # at stage 3, fp32 weights are the masters
        masters = self._on_gpu and (whole or item != FLOAT_BYTES)
        return weights, kept * self.summed * self.mine, buffers, masters * FLOAT_BYTES * self.mine

    def _starting(self) -> Moments:
        weights, gradients, buffers, master = self._on_accelerator()
        if self._is_whole:
            facts = FlattenFacts(weights, self.ranks, weights, weights)
            zeros = self._on_gpu * FLOAT_BYTES * self.mine
            of_zenflow = (self.plan is not None) * self.item * self.largest  # for a moment
            flattened = required_bytes(self.setup.flatten_tier or TIERS[0], facts)
            return {
                "flattening": _there(weights, buffers=max(flattened, of_zenflow)),
                "built": _there(weights, 0, buffers + zeros, master),
            }
        # fp32 on its way to the host, or zeros of the first, empty step
        converts = self.setup.offload and self.item != FLOAT_BYTES and not self._weights_on_host
        single = (self._on_gpu or converts) * FLOAT_BYTES * self.most
        return {
            "built": _there(weights, gradients, buffers + self.item * self.largest, master),
            "first": _there(weights, 0, single, master),
        }

    def _backward(self) -> Moments:
        if not self._is_whole:
            pairs = self._partitioned_backward()
        elif self.setup.stage == 1 and (not self.setup.overlaps or self.setup.accumulation > 1):
            pairs = self._whole_gradients()
        else:
            pairs = self._flat_backward()
        return {str(at): _there(0, *pair) for at, pair in enumerate(pairs)}

    @property
    def _across(self) -> int:
        """Bytes of a copy of the bucket, made if its contents belong to several ranks."""
        return self.item * self.filled if self.ranks > 1 else 0

    def _whole_gradients(self) -> list[tuple[int, int]]:
        """Gradients and buffers at stage 1, if all gradients are kept until the last micro-step."""
        whole, bucket = self.summed * self.params, self.summed * self.setup.bucket
        rest, own = whole - self.summed * self.filled, self.summed * self.mine
        if self.setup.offload:
            return [(whole, bucket), (rest, bucket + max(self._across, NORM_BYTES * self.largest))]
        if self.summed != self.item:
            converted = (self.summed + self.item) * self.filled
            return [(whole, bucket), (rest + own, bucket + converted)]
        return [(whole, bucket), (rest + own, bucket), (rest, bucket + self._across)]

    def _flat_backward(self) -> list[tuple[int, int]]:
        """Gradients and buffers at stage 2, and at stage 1 if gradients are reduced at once."""
        item, summed, largest = self.item, self.summed, self.largest
        fits, accumulates = (
            self.setup.reduce_bucket_size >= self.params,
            self.setup.accumulation > 1,
        )
        bucket = item * self.setup.bucket + (0 if fits else item * largest)
        reduced, own = item * self.filled + FLOAT_BYTES * largest, summed * self.mine
        if self.setup.offload:
            return [(0, bucket + max(self._across, NORM_BYTES * largest))]
        if self._leaves:
            earlier = accumulates * summed * largest
            if summed == item:
                return [(0, bucket + max(self._across, earlier))]
            return [(summed * self.filled, bucket + max(reduced, earlier + item * largest))]
        if summed != item:
            return [(own, bucket + reduced)]
        before = accumulates * own
        return [(before + (not fits) * own, bucket + self._across), (own + before, bucket)]

    def _partitioned_backward(self) -> list[tuple[int, int]]:
        """Gradients and buffers at stage 3, which also gathers parameters, in forward as well."""
        setup, item, params = self.setup, self.item, self.params
        reused = setup.max_reuse_distance // 2 + self.largest
        live = min(params, max(setup.max_live_parameters, reused))
        again = min(setup.max_live_parameters, params - self.filled)
        copy = 0 if setup.stage3_allgather_single_param else min(setup.prefetch_bucket_size, params)
        if self.ranks == 1 and not self._weights_on_host:  # a partition is its whole parameter
            live = again = copy = 0
        made = item * self.largest + self._reduced()
        gathered, reducing = item * (live + copy), item * (again + self.filled) + made
        return [(0, max(gathered, item * live + made, reducing))]

    def _reduced(self) -> int:
        """Bytes of stage 3's copies of a reduced gradient, and of the norm's in fp64."""
        each = -(-self.largest // self.ranks)
        if self._sums_apart and self._weights_on_host:
            floats = FLOAT_BYTES * (2 if self.ranks == 1 else 1)  # one rank's sum is a copy
            return (NORM_BYTES + floats + self.item) * each
        if self.summed != self.item:
            return FLOAT_BYTES * -(-self.filled // self.ranks)
        if self.setup.offload or self._leaves:
            norm = 0 if self._leaves and not self._weights_on_host else NORM_BYTES
            return (norm + self.item) * each
        return 0

    def _step(self) -> Moments:
        """The flat gradient of a partition, converted for the optimizer."""
        if self.setup.offload or self._leaves:
            return {}
        summed, whole = self.summed * self.most, self._is_whole
        handed = FLOAT_BYTES if self.plan is None else DTYPE_BYTES[self.plan.dtypes.gradient]
        converted = handed * self.most if handed != self.summed else 0
        flat = 0 if whole and self.summed != self.item else summed  # then one flat tensor already
        of_torch = self.plan is None and not self.setup.fused_adam
        return {
            "gather": _there(0, whole * summed + flat + converted),
            "update": _there(0, handed * self.most, of_torch * FLOAT_BYTES * self.most),
        }

    def _gathering(self) -> Moments:
        """An export at stage 3 gathers layer by layer."""
        if self._is_whole or not self.setup.gathers_on_save:
            return {}
        uploaded = -(-self.largest // self.ranks) if self._weights_on_host else 0
        return {"export": _there(buffers=self.item * (self.largest + uploaded))}

    # -- on the host -------------------------------------------------------------------------------

    def _by_torch(
        self, kind: str, nbytes: int, arrays: Sequence[Run] = (Run(1, 1),), pins: bool | None = None
    ) -> Part:
        """Arrays of `nbytes` per element, allocated by torch, which page-locks powers of two."""
        pins = self.setup.pins if pins is None else pins
        sizes = [(nbytes * run.numel, run.times) for run in arrays]
        if pins and self.setup.rounds_pinned:
            sizes = [(1 << (size - 1).bit_length() if size else 0, times) for size, times in sizes]
        total = sum(size * times for size, times in sizes)
        return Part(kind, total, Memory.PAGE_LOCKED if pins else Memory.PAGEABLE)

    def _on_host(self, *, at_start: bool) -> list[Part]:
        """Weights, gradients, and ZeRO-Offload's state; its moments and the sums of stages 1 and 2
        come with the first steps."""
        setup, mine = self.setup, self.mine
        weights = self._weights_on_host * self.item * mine
        parts = [self._by_torch("weights", weights, pins=True)]
        if self.plan is not None:
            return [*parts, self._by_torch("gradients", self._sums_apart * FLOAT_BYTES * mine)]
        if not setup.offload:
            return parts
        pins, whole = setup.pins and self._is_whole, self._is_whole
        parts += [
            self._by_torch("optimizer", FLOAT_BYTES, self.partitions, pins),
            self._by_torch("gradients", FLOAT_BYTES, self.partitions),
            self._by_torch("gradients", 0 if whole else self.summed * mine),
            self._by_torch("buffers", whole * self.item, self.partitions),
            self._by_torch("buffers", whole * self.item * self.largest),
        ]
        if at_start:
            return parts
        moments = FLOAT_BYTES * mine * len(setup.layout.moments)
        sums = self.item * mine if whole and setup.accumulation > 1 and setup.stage > 1 else 0
        locked = Memory.PAGE_LOCKED if setup.pins else Memory.PAGEABLE
        return [
            *parts,
            Part("optimizer", moments, Memory.PAGEABLE),
            Part("gradients", sums, locked),  # one array per parameter, so not rounded
        ]

    def _starting_on_host(self) -> Moments:
        item, built = self.item, self._on_host(at_start=True)
        found: dict[str, list[Part]] = {}
        if not self._is_whole:
            found["defragmentation"] = [_buffers(item * self.mine)]
        elif self.setup.flatten_tier == "host":  # this rank's slice and two chunks
            found["flattening"] = [_buffers(item * self.mine), passing(item * self.most, 2)]
        if self.plan is not None:
            # at stage 3, DeepSpeed page-locks an array by copying it
            copied = 0 if self._is_whole or not self.setup.pins else built[-1].nbytes
            found |= {"build": built[:1], "sums": [*built, _buffers(copied)]}
            found["buffer"] = [_buffers(self._is_whole * item * self.largest)]
        elif self.setup.offload:
            converted = max(item * self.mine if self.setup.pins else 0, FLOAT_BYTES * self.most)
            found["built"] = [*built, _buffers(0 if self._is_whole else converted)]
            found["master"] = [*built[:2], passing(item * self.most, 2)]
        return found

    def _step_on_host(self) -> Moments:
        """Torch's AdamW has two temporaries of a partition's size."""
        of_torch = self.setup.offload and not self.setup.fused_adam
        return {"step": [_buffers(of_torch * 2 * FLOAT_BYTES * self.most)]}

    def _saving(self) -> Moments:
        """The first rank writes the module, which DeepSpeed copies to the host first. We copy it in
        chunks, except what stage 3 gathers."""
        module, chunk = _buffers(self.item * self.params), passing(self.item * self.largest)
        written = self.is_first and self._is_whole
        exported = self.is_first and (self._is_whole or self.setup.gathers_on_save)
        beside = self.plan is not None and self.plan.saves_beside
        ours = self.plan is not None
        return {
            "module": [chunk if ours and not beside else module] if written else [],
            "export": [chunk if ours and self._is_whole else module] if exported else [],
            # copied tensor by tensor
            "state": [_buffers(FLOAT_BYTES * self.most)] if self._on_gpu else [],
        }
