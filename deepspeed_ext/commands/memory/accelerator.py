"""Computes the accelerator memory of a rank, phase by phase. Pure functions.

Symbols: n parameters, N ranks, p elements of this rank's partitions, w bytes of a weight, a bytes of an accumulated
gradient, B elements of a reduction bucket and e <= B of them filled, L elements of the largest parameter.
DeepSpeed's own buffers are those of 0.19.8. A phase has several moments; the plan takes the one with the most bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Setup
from deepspeed_ext.flatten.plan import TIERS, FlattenFacts, required_bytes
from deepspeed_ext.zenflow.plan.held import SHARE, Held, Part, Phase, largest
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["accelerator_parts"]

NORM_BYTES = 8
"""Bytes per element in DeepSpeed's norm of a gradient, which is computed in fp64."""

MOMENTS = ("moment m", "moment v")
Parts = tuple[Part, ...]


def accelerator_parts(model: Model, ranks: Ranks, setup: Setup) -> Mapping[Phase, Parts]:
    """The parts of each phase."""
    return _Accelerator(model, ranks, setup).phases()


class _Accelerator:
    """The sizes that several phases need."""

    def __init__(self, model: Model, ranks: Ranks, setup: Setup) -> None:
        self.model, self.setup, self.ranks = model, setup, ranks
        self.params, self.largest, self.weight = model.params, model.largest, model.itemsize
        self.dtype, self.dtypes = model.dtype, setup.dtypes(model)
        self.held = None if setup.zenflow is None else Held(setup.zenflow_plan(model, ranks))
        self.leaves_early = setup.copies in (Copies.WEIGHTS, Copies.NONE)
        self.accumulated = DTYPE_BYTES[setup.accumulation_dtype(model)]
        self.handed = DTYPE_BYTES[self.dtypes.gradient] if setup.zenflow is not None else FLOAT_BYTES
        self.partitions = setup.partitions(model, ranks)
        self.numel = sum(run.numel * run.times for run in self.partitions)
        self.most = max(run.numel for run in self.partitions)
        self.filled = min(setup.reduce_bucket_size, model.params)
        self.whole, self.on_host = not setup.partitions_weights, setup.weights is Place.HOST

    def phases(self) -> Mapping[Phase, Parts]:
        between = self.between()
        if self.whole:
            backward, step = self.flat_backward(), self.flat_step()
        else:
            backward, step = self.partitioned_backward(), self.partitioned_step()
        return {
            Phase.START: self.start(between),
            Phase.BETWEEN: largest(between),
            Phase.BACKWARD: largest(*([*between, *moment] for moment in backward)),
            Phase.STEP: largest(*([*between, *moment] for moment in step)),
            Phase.SAVE: largest(between),
        }

    # -- between steps --------------------------------------------------------------------------------------------

    def between(self) -> list[Part]:
        """Memory that is held all the time."""
        held = [
            Part("weights", 0 if self.on_host else self.weight * self.numel * (self.ranks.count if self.whole else 1))
        ]
        if self.setup.on_accelerator:
            aliased = not self.whole and self.weight == FLOAT_BYTES  # the weights are the masters
            held += [Part("master", 0 if aliased else FLOAT_BYTES * self.numel)]
            held += [Part(moment, FLOAT_BYTES * self.numel) for moment in MOMENTS[: len(self.setup.layout.moments)]]
        if not self.whole:
            if not (self.setup.offload or self.leaves_early):
                held.append(Part("gradients", self.accumulated * self.numel))
            if self.setup.contiguous_gradients:
                held.append(Part("reduction buckets", self.weight * self.setup.reduce_bucket_size))
        elif self.setup.offload:
            held.append(Part("offload buffer", self.weight * self.largest))
        return held + ([] if self.held is None else self.held.on_accelerator())

    # -- start-up -------------------------------------------------------------------------------------------------

    def start(self, between: list[Part]) -> Parts:
        """Memory while the engine is built. Adam's moments and the estimate's state are allocated later, in the first
        steps."""
        kept = {"weights", "master", "gradients", "reduction buckets", "offload buffer", "landing buffers", SHARE}
        built = [part for part in between if part.kind in kept]
        if not self.whole:
            # before the copy to the host
            converts = self.setup.offload and self.setup.zenflow is None and self.weight != FLOAT_BYTES
            conversion = Part("conversion", FLOAT_BYTES * self.most if converts else 0)
            converted = [] if self.on_host else [Part("weights", self.weight * self.numel), conversion]
            states = [part for part in between if part.kind in ("weights", "master") and self.setup.on_accelerator]
            gradient = Part("zeros", FLOAT_BYTES * self.most if states else 0)  # of the first, empty step
            partitioning = Part("parameter being partitioned", self.weight * self.largest)
            return largest([*built, partitioning], converted, [*states, gradient])
        weights = self.weight * self.numel * self.ranks.count
        facts = FlattenFacts(weights, self.ranks.count, weights, weights)
        copy = required_bytes(self.setup.flatten_tier or TIERS[0], facts)
        zeros = FLOAT_BYTES * self.numel if self.setup.on_accelerator else 0
        buffer = self.weight * self.largest if self.setup.zenflow is not None else 0  # DeepSpeed's, for a moment
        return largest(
            [Part("weights", weights), Part("copy for flattening", copy)],
            [Part("weights", weights), Part("offload buffer", buffer)],
            [*built, Part("zeros", zeros)],
        )

    # -- stages 1 and 2 -------------------------------------------------------------------------------------------

    def flat_backward(self) -> list[list[Part]]:
        """Moments of backward at stages 1 and 2, where each rank has all weights."""
        if self.setup.stage == 1 and (not self.setup.overlaps or self.setup.accumulation > 1):
            return self.whole_gradients()
        buckets = self.buckets(self.weight)
        made = self.weight * self.largest if self.setup.reduce_bucket_size < self.params else 0
        common = [Part("reduction buckets", buckets), Part("gradient being made", made)]
        across = self.across()
        if self.setup.offload:
            copies = max(across, NORM_BYTES * self.largest)
            return [[*common, Part("reduction copies", copies)]]
        if self.leaves_early:
            return [[*common, *moment] for moment in self._leaving()]
        own = Part("gradients", self.accumulated * self.numel)
        if self.accumulated != self.weight:
            copies = self.weight * self.filled + FLOAT_BYTES * self.largest
            return [[own, *common, Part("reduction copies", copies)]]
        before = Part("accumulated gradients", own.nbytes if self.setup.accumulation > 1 else 0)
        if self.setup.reduce_bucket_size < self.params:
            return [[own, before, *common, Part("reduction copies", across)]]
        return [[before, *common, Part("reduction copies", across)], [own, before, *common]]

    def _leaving(self) -> list[list[Part]]:
        """Moments of backward at stage 2 if reduced gradients go to the host: while they are reduced, and while one of
        them is added to earlier ones."""
        earlier = self.accumulated * self.largest if self.setup.accumulation > 1 else 0
        if self.accumulated == self.weight:
            return [[Part("reduction copies", max(self.across(), earlier))]]
        sums = Part("sums of gradients", self.accumulated * self.filled)
        copies = self.weight * self.filled + FLOAT_BYTES * self.largest
        leaving = earlier + self.weight * self.largest
        return [[sums, Part("reduction copies", copies)], [sums, Part("reduction copies", leaving)]]

    def whole_gradients(self) -> list[list[Part]]:
        """Moments of backward at stage 1, if every parameter's gradient is kept until the last micro-step."""
        gradients, filled = self.accumulated * self.params, self.accumulated * self.filled
        buckets = Part("reduction buckets", self.buckets(self.accumulated))
        full = [Part("gradients", gradients), buckets]
        if not self.setup.contiguous_gradients:
            return [[*full, Part("reduction copies", filled)]]
        if self.setup.offload:
            copies = Part("reduction copies", max(self.across(), NORM_BYTES * self.largest))
            return [full, [Part("gradients", gradients - filled), buckets, copies]]
        own = Part("partition of the gradients", self.accumulated * self.numel)
        rest = Part("gradients", gradients - filled)
        if self.accumulated != self.weight:  # reduced in the weights' dtype
            return [full, [rest, buckets, own, Part("reduction copies", filled + self.weight * self.filled)]]
        return [full, [rest, buckets, own], [rest, buckets, Part("reduction copies", self.across())]]

    def buckets(self, itemsize: int) -> int:
        """Bytes of the buckets in which gradients are reduced; two alternate if they are reduced during backward."""
        if not self.setup.contiguous_gradients:
            return itemsize * self.filled
        return itemsize * self.setup.reduce_bucket_size * (2 if self.setup.overlaps else 1)

    def across(self) -> int:
        """Bytes of a copy of the bucket's contents, which is made if they belong to several ranks."""
        return self.weight * self.filled if self.ranks.count > 1 else 0

    def flat_step(self) -> list[list[Part]]:
        """Moments of the optimizer step."""
        if self.setup.offload:
            return [[]]
        if self.held is not None and self.leaves_early:
            return [self.held.lifting(self.numel), self.exchange()]
        copied = self.accumulated == self.weight  # otherwise the gradients are one flat tensor already
        made = self.accumulated * self.numel if copied else 0
        converted = self.handed * self.numel if self.handed != self.accumulated else 0
        gathered = [
            Part("gradients", self.accumulated * self.numel),
            Part("flat gradient", made + converted),
        ]
        return [
            gathered,
            self.updating(self.numel),
            self.exchange(),
        ]

    def updating(self, numel: int) -> list[Part]:
        """Memory while a partition of `numel` elements is updated."""
        flat = Part("flat gradient", self.handed * numel)
        if self.held is None:
            return [flat, Part("temporaries", 0 if self.setup.fused_adam else FLOAT_BYTES * numel)]
        return [flat, *self.held.updating(numel)]

    def exchange(self) -> list[Part]:
        """Memory while stages 1 and 2 exchange only hot weights."""
        return [] if self.held is None else self.held.exchange(self.ranks.count)

    # -- stage 3 --------------------------------------------------------------------------------------------------

    def partitioned_backward(self) -> list[list[Part]]:
        """Moments of the forward and the backward at stage 3."""
        setup, weight = self.setup, self.weight
        live = min(self.params, max(setup.max_live_parameters, setup.max_reuse_distance // 2 + self.largest))
        again = min(setup.max_live_parameters, self.params - self.filled)
        copy = 0 if setup.stage3_allgather_single_param else min(setup.prefetch_bucket_size, self.params)
        if self.ranks.count == 1 and not self.on_host:  # the partition is the whole parameter and is used in place
            live = again = copy = 0
        made = Part("gradient being made", weight * self.largest)
        reduced = 0
        norm = 0 if self.leaves_early and not self.on_host else NORM_BYTES
        if setup.sums_apart(self.model) and self.on_host:
            floats = FLOAT_BYTES * (2 if self.ranks.count == 1 else 1)  # one rank's sum is not made in place
            reduced = (NORM_BYTES + floats + weight) * -(-self.largest // self.ranks.count)
        elif self.accumulated != weight:
            reduced = FLOAT_BYTES * -(-self.filled // self.ranks.count)
        elif setup.offload or self.leaves_early:
            reduced = (norm + weight) * -(-self.largest // self.ranks.count)
        return [
            [Part("live parameters", weight * live), Part("gather copies", weight * copy)],
            [Part("live parameters", weight * live), made, Part("reduction copies", reduced)],
            [
                Part("live parameters", weight * again),
                made,
                Part("reduction copies", weight * self.filled + reduced),
            ],
        ]

    def partitioned_step(self) -> list[list[Part]]:
        """Moments of the optimizer step, which goes from sub-group to sub-group."""
        if self.setup.offload or self.on_host:
            return [[]]
        if self.held is not None and self.leaves_early:
            return [self.held.lifting(self.most)]
        numel = self.most
        converted = self.handed * numel if self.handed != self.accumulated else 0
        return [[Part("flat gradient", self.accumulated * numel + converted)], self.updating(numel)]
