"""Computes the host memory of a rank, phase by phase. Pure functions.

It counts the optimizer's state and buffers, but not the module as built by the script, and not the libraries (about 150
MiB per rank with its optimizer process).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed_ext.commands.memory.host_save import HostSave
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Run, Setup
from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.zenflow.plan.held import Held, Part, Phase, largest
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["host_parts"]

Parts = tuple[Part, ...]


def _power_of_two(nbytes: int) -> int:
    """`nbytes`, rounded up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _by_torch(
    setup: Setup, kind: str, nbytes: int, arrays: Sequence[Run] = (Run(1, 1),), pins: bool | None = None
) -> Part:
    """Arrays of `nbytes` an element that torch allocates, page-locked if `pins`, by default as the config says."""
    pins = setup.pins if pins is None else pins
    rounded = _power_of_two if pins and setup.rounds_pinned else int
    return Part(kind, sum(rounded(nbytes * run.numel) * run.times for run in arrays), pins)


def host_parts(model: Model, ranks: Ranks, setup: Setup, *, first: bool) -> Mapping[Phase, Parts]:
    """The parts of each phase of the first rank of the job, or of another one."""
    return _Host(model, ranks, setup, first).phases()


class _Host:
    """The sizes that several phases need; symbols as in `accelerator`."""

    def __init__(self, model: Model, ranks: Ranks, setup: Setup, first: bool) -> None:
        self.model, self.setup, self.first = model, setup, first
        self.held = None if setup.zenflow is None else Held(setup.zenflow_plan(model, ranks))
        self.partitions = setup.partitions(model, ranks)
        self.numel = sum(run.numel * run.times for run in self.partitions)
        self.most = max(run.numel for run in self.partitions)

    def phases(self) -> Mapping[Phase, Parts]:
        between = self.between()
        saving = HostSave(self.model, self.setup, self.held, self.numel, self.most, self.first)
        return {
            Phase.START: self.start(between),
            Phase.BETWEEN: largest(between),
            Phase.BACKWARD: largest(between),
            Phase.STEP: largest([*between, self.temporaries()]),
            Phase.SAVE: largest(*([*between, *moment] for moment in saving.moments())),
        }

    def between(self) -> list[Part]:
        """Memory that is held all the time."""
        whole = self.model.itemsize * self.numel if self.setup.weights is Place.HOST else 0
        weights = _by_torch(self.setup, "weights", whole, pins=True)
        if self.held is not None:
            return [weights, *self.held.on_host(), self.sums()]
        return [weights, *(self.offloaded() if self.setup.offload else [])]

    def sums(self) -> Part:
        """Sums of gradients that are on the host in another dtype than that of the ring."""
        nbytes = FLOAT_BYTES * self.numel if self.setup.sums_apart(self.model) else 0
        return _by_torch(self.setup, "accumulated gradients", nbytes)

    def offloaded(self) -> list[Part]:
        """State and buffers of DeepSpeed's ZeRO-Offload."""
        weight = self.model.itemsize
        pins_masters = self.setup.pins and not self.setup.partitions_weights  # DeepSpeed does so below stage 3
        parts = [
            _by_torch(self.setup, "master", FLOAT_BYTES, self.partitions, pins_masters),
            Part("moment m", FLOAT_BYTES * self.numel),
            Part("moment v", FLOAT_BYTES * self.numel),
            _by_torch(self.setup, "gradients", FLOAT_BYTES, self.partitions),
        ]
        if self.setup.partitions_weights:
            accumulated = DTYPE_BYTES[self.setup.accumulation_dtype(self.model)]
            return [*parts, _by_torch(self.setup, "accumulated gradients", accumulated * self.numel)]
        accumulates = self.setup.accumulation > 1 and self.setup.stage > 1
        return [
            *parts,
            _by_torch(self.setup, "16-bit copy of the weights", weight, self.partitions),
            Part("accumulated gradients", weight * self.numel if accumulates else 0, self.setup.pins),  # by parameter
            _by_torch(self.setup, "offload buffer", weight * self.model.largest),
        ]

    def start(self, between: list[Part]) -> Parts:
        """Memory while the engine is built."""
        flattening = [] if self.setup.partitions_weights else self.flattening()
        return largest(self.building(between), flattening)

    def flattening(self) -> list[Part]:
        """Memory while the ``host`` tier flattens: this rank's slice and two chunks."""
        if self.setup.flatten_tier != "host":
            return []
        return [Part("slice for flattening", self.model.itemsize * self.numel), self.staging()]

    def building(self, between: list[Part]) -> Parts:
        """Memory while the optimizer is built. ZeRO-Offload allocates Adam's moments in the first step."""
        weight = self.model.itemsize
        if self.held is not None:
            arena = self.held.arena(at_start=True)
            if self.setup.partitions_weights:
                weights, *sums = [part for part in between if part.kind in ("weights", "accumulated gradients")]
                copied = [part for part in sums if part.page_locked]  # by DeepSpeed, to lock its pages
                return largest(
                    [weights, *arena, *([] if self.setup.weights is Place.HOST else [self.staging()])],
                    [weights, *arena, *sums, *copied],
                    self.defragmentation(),
                )
            sums = [part for part in between if part.kind == "accumulated gradients"]
            buffer = Part("DeepSpeed's buffer", weight * self.model.largest)
            return largest([*arena, self.staging()], [*arena, *sums], [buffer])
        if not self.setup.offload:
            return largest(self.defragmentation() if self.setup.partitions_weights else ())
        built = [part for part in between if part.kind not in ("moment m", "moment v")]
        if self.setup.partitions_weights:
            pinning = weight * self.numel if self.setup.pins else 0
            conversion = Part("conversion", max(pinning, FLOAT_BYTES * self.most))
            return largest([*built, conversion], self.defragmentation())
        built = [part for part in built if part.kind != "accumulated gradients"]
        master = [part for part in built if part.kind == "master"]
        return largest(built, [*master, self.staging()])

    def defragmentation(self) -> list[Part]:
        """Memory while stage 3 makes the partitions of the weights contiguous, for which it collects them on the
        host."""
        return [Part("defragmentation", self.model.itemsize * self.numel)]

    def staging(self) -> Part:
        """The chunks through which a partition of the masters is copied from the accelerator."""
        most = self.most if self.held is None else self.held.largest_on_host
        return Part("staging", 2 * min(STAGING_CHUNK_BYTES, self.model.itemsize * most), page_locked=True)

    def temporaries(self) -> Part:
        """Temporaries of an optimizer step. Torch's AdamW on the host: two of a partition's size."""
        if self.held is not None:
            return self.held.moved()
        uses_torch = self.setup.offload and not self.setup.fused_adam
        return Part("temporaries", 2 * FLOAT_BYTES * self.most if uses_torch else 0)
