"""Computes what DeepSpeed holds: around ZenFlow, or with its own optimizers. Pure functions.

Symbols: n parameters, N ranks, p elements of this rank's partitions, w bytes of a weight, a bytes
of an accumulated gradient, B elements of a reduction bucket and e <= B of them filled, L elements
of the largest parameter. The buffers are those of DeepSpeed 0.19.8, named in `adapter.buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from deepspeed_ext.adapter.buffers import NORM_BYTES, Buffer
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Run, Setup
from deepspeed_ext.flatten.plan import TIERS, FlattenFacts, required_bytes
from deepspeed_ext.zenflow.plan.held import passing
from deepspeed_ext.zenflow.plan.lanes import Traffic
from deepspeed_ext.zenflow.plan.phases import Memory, Moments, Part, Phase
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["Zero", "offload_traffic"]

MOMENTS = ("moment m", "moment v")
_device_part = partial(Part, memory=Memory.ACCELERATOR)
_host_part = partial(Part, memory=Memory.PAGEABLE)


def offload_traffic(model: Model) -> Traffic:
    """What ZeRO-Offload moves: gradients are converted to fp32 before they go down."""
    down, up = float(FLOAT_BYTES), float(model.itemsize)
    adam = 7 * FLOAT_BYTES  # reads p, m, v and the gradient, writes p, m, v
    copy = FLOAT_BYTES + model.itemsize if model.itemsize < FLOAT_BYTES else 0
    return Traffic(down, up, adam + copy + down + up)


def _power_of_two(nbytes: int) -> int:
    """`nbytes`, rounded up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _named(moments: Iterable[Sequence[Part]]) -> Moments:
    return {str(number): moment for number, moment in enumerate(moments)}


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ZeRO optimizer of one rank: a `phases.Holder`.

    Attributes:
        plan: ZenFlow's plan; None: DeepSpeed's own optimizer steps.
        is_first: whether this is the job's first rank, which alone writes the module.
    """

    model: Model
    ranks: Ranks
    setup: Setup
    plan: ZenFlowPlan | None
    is_first: bool

    def held(self, place: Place) -> list[Part]:
        """What is held between steps."""
        return self._on_host() if place is Place.HOST else self._on_accelerator()

    def moments(self, place: Place, phase: Phase) -> Moments:
        """The moments of a phase."""
        on_host = {
            Phase.START: self._starting_on_host,
            Phase.STEP: self._host_step,
            Phase.SAVE: self._saving,
            Phase.LOAD: self._loading,
            Phase.SLEEP: self._asleep,
        }
        on_accelerator = {
            Phase.START: self._starting,
            Phase.BACKWARD: self._backward,
            Phase.STEP: self._step,
            Phase.SAVE: self._gathering,
            Phase.LOAD: self._loading_on_device,
            Phase.SLEEP: self._left_on_device,
        }
        found = (on_host if place is Place.HOST else on_accelerator).get(phase)
        return {} if found is None else found()

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def _weight(self) -> int:
        return self.model.itemsize

    @cached_property
    def _partitions(self) -> list[Run]:
        return self.setup.partitions(self.model, self.ranks)

    @cached_property
    def _numel(self) -> int:
        return sum(run.numel * run.times for run in self._partitions)

    @cached_property
    def _most(self) -> int:
        return max(run.numel for run in self._partitions)

    @property
    def _is_whole(self) -> bool:
        return not self.setup.partitions_weights

    @property
    def _weights_on_host(self) -> bool:
        return self.setup.weights is Place.HOST

    @property
    def _weight_bytes(self) -> int:
        """Bytes of all weights of this rank."""
        return self._weight * self._numel * (self.ranks.count if self._is_whole else 1)

    @property
    def _filled(self) -> int:
        return min(self.setup.reduce_bucket_size, self.model.params)

    @property
    def _gradients_on_host(self) -> bool:
        """Whether gradients go to ZenFlow during backward."""
        return self.plan is not None and self.plan.places.gradient is Place.HOST

    @cached_property
    def _accumulated(self) -> int:
        return DTYPE_BYTES[self.setup.accumulation_dtype(self.model)]

    @property
    def _handed(self) -> int:
        return FLOAT_BYTES if self.plan is None else DTYPE_BYTES[self.plan.dtypes.gradient]

    @property
    def _sums_apart(self) -> bool:
        return self.plan is not None and self._gradients_on_host and self.plan.dtypes.sums_apart

    @property
    def _across(self) -> int:
        """Bytes of a copy of the bucket, made if its contents belong to several ranks."""
        return self._weight * self._filled if self.ranks.count > 1 else 0

    @property
    def _per_rank(self) -> int:
        """Elements of a rank's part of the largest parameter."""
        return -(-self.model.largest // self.ranks.count)

    def _states(self) -> list[int]:
        """Bytes of each moment of DeepSpeed's optimizer."""
        return [FLOAT_BYTES * self._numel] * len(self.setup.layout.moments)

    def _by_torch(
        self, kind: str, nbytes: int, arrays: Sequence[Run] = (Run(1, 1),), pins: bool | None = None
    ) -> Part:
        """Host arrays of `nbytes` per element, allocated by torch; page-locked if `pins`, by
        default as the config says."""
        pins = self.setup.pins if pins is None else pins
        rounded = _power_of_two if pins and self.setup.rounds_pinned else int
        total = sum(rounded(nbytes * run.numel) * run.times for run in arrays)
        return Part(kind, total, Memory.PAGE_LOCKED if pins else Memory.PAGEABLE)

    # -- between steps -----------------------------------------------------------------------------

    def _on_accelerator(self) -> list[Part]:
        setup, weight = self.setup, self._weight
        held = [
            _device_part(Buffer.WEIGHTS.shown, 0 if self._weights_on_host else self._weight_bytes)
        ]
        if setup.on_accelerator:
            aliased = not self._is_whole and weight == FLOAT_BYTES  # the weights are the masters
            held.append(
                _device_part(Buffer.MASTER.shown, 0 if aliased else FLOAT_BYTES * self._numel)
            )
            held += map(_device_part, MOMENTS, self._states())
        if self._is_whole:
            buffer = weight * self.model.largest if setup.offload else 0
            return [*held, _device_part(Buffer.OFFLOAD.shown, buffer)]
        if not (setup.offload or self._gradients_on_host):
            held.append(_device_part(Buffer.GRADIENTS.shown, self._accumulated * self._numel))
        bucket = weight * setup.reduce_bucket_size if setup.contiguous_gradients else 0
        return [*held, _device_part(Buffer.BUCKETS.shown, bucket)]

    def _on_host(self) -> list[Part]:
        whole = self._weight * self._numel if self._weights_on_host else 0
        weights = self._by_torch(Buffer.WEIGHTS.shown, whole, pins=True)
        if self.plan is not None:
            sums = FLOAT_BYTES * self._numel if self._sums_apart else 0
            return [weights, self._by_torch(Buffer.ACCUMULATED.shown, sums)]
        return [weights, *(self._offloaded() if self.setup.offload else [])]

    def _offloaded(self) -> list[Part]:
        """State and buffers of ZeRO-Offload."""
        setup, weight = self.setup, self._weight
        pins_masters = setup.pins and self._is_whole
        parts = [
            self._by_torch(Buffer.MASTER.shown, FLOAT_BYTES, self._partitions, pins_masters),
            *(_host_part(kind, FLOAT_BYTES * self._numel) for kind in MOMENTS),
            self._by_torch(Buffer.GRADIENTS.shown, FLOAT_BYTES, self._partitions),
        ]
        if not self._is_whole:
            return [
                *parts,
                self._by_torch(Buffer.ACCUMULATED.shown, self._accumulated * self._numel),
            ]
        accumulates = setup.accumulation > 1 and setup.stage > 1
        by_parameter = Memory.PAGE_LOCKED if setup.pins else Memory.PAGEABLE
        return [
            *parts,
            self._by_torch(Buffer.COPY.shown, weight, self._partitions),
            Part(
                Buffer.ACCUMULATED.shown, weight * self._numel if accumulates else 0, by_parameter
            ),
            self._by_torch(Buffer.OFFLOAD.shown, weight * self.model.largest),
        ]

    # -- start-up ----------------------------------------------------------------------------------

    def _starting(self) -> Moments:
        """The optimizer's moments are allocated in the first step."""
        weight, setup = self._weight, self.setup
        built = [part for part in self._on_accelerator() if part.kind not in MOMENTS]
        if self._is_whole:
            weights = _device_part(Buffer.WEIGHTS.shown, self._weight_bytes)
            facts = FlattenFacts(weights.nbytes, self.ranks.count, weights.nbytes, weights.nbytes)
            copy = required_bytes(setup.flatten_tier or TIERS[0], facts)
            zeros = FLOAT_BYTES * self._numel if setup.on_accelerator else 0
            buffer = weight * self.model.largest if self.plan is not None else 0  # for a moment
            return {
                "flattening": [weights, _device_part("copy for flattening", copy)],
                "buffer": [weights, _device_part(Buffer.OFFLOAD.shown, buffer)],
                "built": [*built, _device_part("zeros", zeros)],
            }
        converts = setup.offload and weight != FLOAT_BYTES  # before the copy to the host
        conversion = _device_part("conversion", FLOAT_BYTES * self._most if converts else 0)
        weights = _device_part(Buffer.WEIGHTS.shown, weight * self._numel)
        states = built[:2] if setup.on_accelerator else []
        zeros = FLOAT_BYTES * self._most if states else 0  # of the first, empty step
        return {
            "built": [
                *built,
                _device_part("parameter being partitioned", weight * self.model.largest),
            ],
            "converted": [] if self._weights_on_host else [weights, conversion],
            "first step": [*states, _device_part("zeros", zeros)],
        }

    def _starting_on_host(self) -> Moments:
        if self._is_whole:
            return {**self._flattening(), **self._building()}
        collected = [_host_part("defragmentation", self._weight * self._numel)]
        return {"defragmentation": collected, **self._partitioning()}

    def _flattening(self) -> Moments:
        """The ``host`` tier: this rank's slice and two chunks."""
        if self.setup.flatten_tier != "host":
            return {}
        chunks = passing(self._weight * self._most, 2)
        return {
            "flattening": [_host_part("slice for flattening", self._weight * self._numel), chunks]
        }

    def _building(self) -> Moments:
        built = self._on_host()
        if self.plan is not None:
            buffer = _host_part("DeepSpeed's buffer", self._weight * self.model.largest)
            return {"sums": built, "buffer": [buffer]}
        if not self.setup.offload:
            return {}
        later = (*MOMENTS, Buffer.ACCUMULATED.shown)
        masters = [part for part in built if part.kind == Buffer.MASTER.shown]
        return {
            "built": [part for part in built if part.kind not in later],
            "master": [*masters, passing(self._weight * self._most, 2)],
        }

    def _partitioning(self) -> Moments:
        """At stage 3, DeepSpeed page-locks an array by copying it."""
        held = self._on_host()
        if self.plan is not None:
            weights, sums = held
            copied = sums.nbytes if sums.memory.is_page_locked else 0
            return {"build": [weights], "sums": [*held, _host_part("copy of the sums", copied)]}
        if not self.setup.offload:
            return {}
        pinning = self._weight * self._numel if self.setup.pins else 0
        conversion = _host_part("conversion", max(pinning, FLOAT_BYTES * self._most))
        return {"built": [*(part for part in held if part.kind not in MOMENTS), conversion]}

    # -- forward and backward ----------------------------------------------------------------------

    def _backward(self) -> Moments:
        if not self._is_whole:
            return _named(self._partitioned_backward())
        if self.setup.stage == 1 and (not self.setup.overlaps or self.setup.accumulation > 1):
            return _named(self._whole_gradients())
        return _named(self._flat_backward())

    def _flat_backward(self) -> list[list[Part]]:
        """Stages 1 and 2, where each rank has all weights."""
        fits = self.setup.reduce_bucket_size >= self.model.params
        made = 0 if fits else self._weight * self.model.largest
        buckets = _device_part(Buffer.BUCKETS.shown, self._buckets(self._weight))
        common = [buckets, _device_part("gradient being made", made)]
        copied = partial(_device_part, "reduction copies")
        if self.setup.offload:
            return [[*common, copied(max(self._across, NORM_BYTES * self.model.largest))]]
        if self._gradients_on_host:
            return [[*common, *moment] for moment in self._leaving()]
        own = _device_part(Buffer.GRADIENTS.shown, self._accumulated * self._numel)
        if self._accumulated != self._weight:
            converted = self._weight * self._filled + FLOAT_BYTES * self.model.largest
            return [[own, *common, copied(converted)]]
        before = _device_part(
            Buffer.ACCUMULATED.shown, own.nbytes if self.setup.accumulation > 1 else 0
        )
        if not fits:
            return [[own, before, *common, copied(self._across)]]
        return [[before, *common, copied(self._across)], [own, before, *common]]

    def _leaving(self) -> list[list[Part]]:
        """While gradients bound for the host are reduced, and while one is added to earlier
        ones."""
        largest = self.model.largest
        earlier = self._accumulated * largest if self.setup.accumulation > 1 else 0
        copied = partial(_device_part, "reduction copies")
        if self._accumulated == self._weight:
            return [[copied(max(self._across, earlier))]]
        sums = _device_part("sums of gradients", self._accumulated * self._filled)
        reduced = copied(self._weight * self._filled + FLOAT_BYTES * largest)
        return [[sums, reduced], [sums, copied(earlier + self._weight * largest)]]

    def _whole_gradients(self) -> list[list[Part]]:
        """Stage 1, if every parameter's gradient is kept until the last micro-step."""
        filled = self._accumulated * self._filled
        gradients = _device_part(Buffer.GRADIENTS.shown, self._accumulated * self.model.params)
        rest = _device_part(Buffer.GRADIENTS.shown, gradients.nbytes - filled)
        buckets = _device_part(Buffer.BUCKETS.shown, self._buckets(self._accumulated))
        copied = partial(_device_part, "reduction copies")
        full = [gradients, buckets]
        if not self.setup.contiguous_gradients:
            return [[*full, copied(filled)]]
        if self.setup.offload:
            copies = copied(max(self._across, NORM_BYTES * self.model.largest))
            return [full, [rest, buckets, copies]]
        own = _device_part("partition of the gradients", self._accumulated * self._numel)
        if self._accumulated != self._weight:  # reduced in the weights' dtype
            return [full, [rest, buckets, own, copied(filled + self._weight * self._filled)]]
        return [full, [rest, buckets, own], [rest, buckets, copied(self._across)]]

    def _buckets(self, itemsize: int) -> int:
        """Bytes of the buckets in which gradients are reduced; two alternate if they are reduced
        during backward."""
        if not self.setup.contiguous_gradients:
            return itemsize * self._filled
        return itemsize * self.setup.reduce_bucket_size * (2 if self.setup.overlaps else 1)

    def _partitioned_backward(self) -> list[list[Part]]:
        """Stage 3, which also gathers parameters, in forward as well."""
        setup, weight, params = self.setup, self._weight, self.model.params
        again = min(setup.max_live_parameters, params - self._filled)
        reused = setup.max_reuse_distance // 2 + self.model.largest
        live = min(params, max(setup.max_live_parameters, reused))
        single = setup.stage3_allgather_single_param
        copy = 0 if single else min(setup.prefetch_bucket_size, params)
        if (
            self.ranks.count == 1 and not self._weights_on_host
        ):  # a partition is its whole parameter
            live = again = copy = 0
        lives, copied = (
            partial(_device_part, "live parameters"),
            partial(_device_part, "reduction copies"),
        )
        made, reduced = (
            _device_part("gradient being made", weight * self.model.largest),
            self._reduced(),
        )
        return [
            [lives(weight * live), _device_part("gather copies", weight * copy)],
            [lives(weight * live), made, copied(reduced)],
            [lives(weight * again), made, copied(weight * self._filled + reduced)],
        ]

    def _reduced(self) -> int:
        """Bytes of stage 3's copies of a reduced gradient."""
        if self._sums_apart and self._weights_on_host:
            floats = FLOAT_BYTES * (2 if self.ranks.count == 1 else 1)  # one rank's sum is a copy
            return (NORM_BYTES + floats + self._weight) * self._per_rank
        if self._accumulated != self._weight:
            return FLOAT_BYTES * -(-self._filled // self.ranks.count)
        if self.setup.offload or self._gradients_on_host:
            norm = 0 if self._gradients_on_host and not self._weights_on_host else NORM_BYTES
            return (norm + self._weight) * self._per_rank
        return 0

    # -- optimizer step ----------------------------------------------------------------------------

    def _step(self) -> Moments:
        """Stage 3 goes from sub-group to sub-group."""
        if self.setup.offload or self._gradients_on_host:
            return {}
        numel, summed, handed = self._most, self._accumulated, self._handed
        converted = handed * numel if handed != summed else 0
        flat = partial(_device_part, "flat gradient")
        gathered = [flat(summed * numel + converted)]
        if self._is_whole:
            made = summed * numel if summed == self._weight else 0  # else one flat tensor already
            gathered = [
                _device_part(Buffer.GRADIENTS.shown, summed * numel),
                flat(made + converted),
            ]
        uses_torch = self.plan is None and not self.setup.fused_adam
        temporaries = [_device_part("temporaries", FLOAT_BYTES * numel)] if uses_torch else []
        return {"gather": gathered, "update": [flat(handed * numel), *temporaries]}

    def _host_step(self) -> Moments:
        """Torch's AdamW on the host has two temporaries of a partition's size."""
        uses_torch = self.setup.offload and not self.setup.fused_adam
        return {
            "step": [_host_part("temporaries", 2 * FLOAT_BYTES * self._most if uses_torch else 0)]
        }

    # -- save and load -----------------------------------------------------------------------------

    def _saving(self) -> Moments:
        """The first rank writes the module, which DeepSpeed copies to the host first. We copy it in
        chunks, except what stage 3 gathers."""
        copy = [_host_part("copy of the module", self._weight * self.model.params)]
        gathers = self.is_first and not self._is_whole and self.setup.gathers_on_save
        writes = self.is_first and self._is_whole
        module = copy if writes else []
        found: dict[str, list[Part]] = {"module": module, "export": copy if gathers else module}
        if self.setup.on_accelerator:  # copied tensor by tensor
            found["state"] = [_host_part("copy of the state", FLOAT_BYTES * self._most)]
        if self.plan is not None and writes:
            chunk = [passing(self._weight * self.model.largest)]
            found |= {"export": chunk} | ({} if self.plan.saves_beside else {"module": chunk})
        return found

    def _gathering(self) -> Moments:
        """An export at stage 3 gathers layer by layer."""
        if self._is_whole or not self.setup.gathers_on_save:
            return {}
        uploaded = self._per_rank if self._weights_on_host else 0
        gathered = self._weight * (self.model.largest + uploaded)
        return {"export": [_device_part("gathered layer", gathered)]}

    def _loading(self) -> Moments:
        """Each rank reads the module's file (stages 1 and 2) and its optimizer file. The former is
        freed before ZenFlow adopts the latter's content."""
        state = FLOAT_BYTES * self._numel + sum(self._states())
        read = state if self.plan is None else self.plan.held.file_bytes
        module = self._weight * self.model.params if self._is_whole else 0
        files = partial(_host_part, "files that are read")
        read, module = (0, 0) if self.setup.maps_files else (read, module)
        return {"load": [files(read + module)], "adopt": [files(read)]}

    def _loading_on_device(self) -> Moments:
        states = sum(self._states()) if self.setup.on_accelerator else 0
        return {"load": [_device_part("loaded moments", states)]}

    # -- asleep ------------------------------------------------------------------------------------

    def _asleep(self) -> Moments:
        """DeepSpeed refuses it with weights on the host."""
        if self._weights_on_host:
            return {}
        buffers = (Buffer.OFFLOAD.shown, Buffer.BUCKETS.shown)
        away = [part for part in self._on_accelerator() if part.kind not in buffers]
        moved = [self._by_torch(f"{part.kind}, away", part.nbytes, pins=True) for part in away]
        return {"asleep": [*self._on_host(), *moved]}

    def _left_on_device(self) -> Moments:
        """ZeRO-Offload keeps a buffer."""
        if self._weights_on_host:
            return {}
        kept = [part for part in self._on_accelerator() if part.kind == Buffer.OFFLOAD.shown]
        return {"asleep": kept}
