"""Defines the plan of a run, which everything is built from and steps consult."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArenaLayout, ArraySpec, plan_layout
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.places import (
    SLOTS_OF_CHUNKS,
    Copies,
    Place,
    Places,
    Source,
    Wait,
    chunk_numel,
)
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES


@dataclass(frozen=True)
class PartitionPlan:
    """One partition of ZeRO, or some of equal size.

    Attributes:
        head: how many of its `numel` elements, at its start, step on the accelerator.
        times: number of such partitions; above 1 only in a plan that nothing is built from.
    """

    numel: int
    head: int
    times: int = 1

    @property
    def on_host(self) -> int:
        """Elements that step on the host."""
        return self.numel - self.head


def head_of(numel: int, ratio: float, block_size: int) -> int:
    """How many of a partition's `numel` elements step on the accelerator: whole blocks, as near as
    possible to all but `ratio` of them."""
    wanted = round(numel * (1.0 - ratio) / block_size) * block_size
    return min(wanted, numel // block_size * block_size)


@dataclass(frozen=True)
class ZenFlowPlan:
    """All decisions about one rank's run.

    Attributes:
        rule: settings of the update rule.
        partitions: this rank's partitions.
        places: where their arrays are.
        host_share: fraction of each partition that steps on the host.
        slot_numel: elements of each of the slots on the host that chunks of copies beside the step
            take in turn, for a gradient and then its y; 0: chunks lie in whole gradients.
        caller: what the ZeRO optimizer around ZenFlow does.
        wait: what waits for weights that arrive by themselves.
        peeks: whether the worker computes exact weights before it steps (`transfers.stream`).
        saves_beside: whether checkpoints are written beside training.
        measures_share: whether the share is chosen after steps were measured (`plan.times`).
        shortage: why a host has too little memory; None: it fits, as far as is known.
        share_reason, other_reasons: each decision and why it was made, the same on every rank.
    """

    rule: RuleSettings
    partitions: tuple[PartitionPlan, ...]
    places: Places
    host_share: float
    caller: Caller
    slot_numel: int = 0
    wait: Wait = Wait.STEP
    peeks: bool = False
    saves_beside: bool = False
    measures_share: bool = False
    shortage: str | None = None
    share_reason: str = ""
    other_reasons: tuple[str, ...] = ()

    # -- places: settled once, because steps ask for them ------------------------------------------

    @cached_property
    def predicts_in_chunks(self) -> bool:
        """Whether the host predicts weights chunk by chunk, which arrive as peeked ones do."""
        return self.rule.estimates and self.copies is Copies.WEIGHTS

    @cached_property
    def copies(self) -> Copies:
        return self.places.copies

    @cached_property
    def source(self) -> Source:
        return self.places.source

    @property
    def decisions(self) -> tuple[object, ...]:
        """The decisions that must agree on all ranks: everything but the sizes of this rank's
        arrays."""
        share = self.host_share, self.measures_share
        return (self.rule, self.places, share, self.shortage, self.wait, self.peeks)

    # -- the arena ---------------------------------------------------------------------------------

    @cached_property
    def gradient_dtype(self) -> str:
        """Name of the dtype of the slots of gradients. Where gradients leave in backward, a slot
        is also where micro-steps are summed."""
        caller = self.caller
        return caller.summed_dtype if self.source is Source.BACKWARD else caller.gradient_dtype

    @cached_property
    def is_in_transit(self) -> bool:
        """Whether gradients and y pass through the host in slots of chunks."""
        return self.slot_numel > 0

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk, whole blocks; the last chunk of a partition may be shorter."""
        return chunk_numel(
            sum(each.on_host * each.times for each in self.partitions), self.rule.block_size
        )

    @property
    def largest_chunk(self) -> int:
        """Elements of the largest chunk there is."""
        return min(self.chunk_numel, max((each.on_host for each in self.partitions), default=0))

    @property
    def lifts_per_block(self) -> bool:
        """Whether the array with an entry for each block is copied to the accelerator."""
        return self.rule.estimates and self.computes_there

    def arrays_of(self, partition: int, numel: int, before: int = 0) -> list[ArraySpec]:
        """The arrays of one partition (see the glossary in `deepspeed_ext.zenflow`).

        Args:
            numel: its elements that step on the host, n.
            before: elements before them, of the same partition of ZeRO, that step on the
                accelerator; whole blocks.
        """
        layout, size, caller = self.rule.layout, self.rule.block_size, self.caller
        blocks, width = -(-numel // size), self.rule.per_block_width

        def spec(kind: str, dtype: str, count: int = numel, **how: Any) -> ArraySpec:
            return ArraySpec(kind, dtype, count, partition, **how)

        found = [spec(kind, dtype, before=before) for kind, dtype in layout.arrays]
        found += [
            spec(kind, "uint8", blocks, before=before // size, per_block=1)
            for kind in layout.scales
        ]
        shown = [kind for kind in layout.shown if kind not in layout.kinds]
        found += [spec(kind, "float32", touched=False, before=before) for kind in shown]
        if not y_replaces_gradient(self):
            lifts = self.places.weights is Place.ACCELERATOR
            found.append(spec("y", caller.weights_dtype, exchanged=lifts))
        if self.rule.estimates:
            of_block, lifts = blocks * width, self.lifts_per_block
            found.append(spec(*layout.per_block, of_block, exchanged=lifts, per_block=width))
        slots = 0 if self.is_in_transit else self.rule.slots(self.source)
        return [*found, *(self._gradient(numel, partition, slot) for slot in range(slots))]

    def _gradient(self, numel: int, partition: int, slot: int) -> ArraySpec:
        """A slot for a gradient, and for y in its place if that fits."""
        y = self.caller.weights_dtype if y_replaces_gradient(self) else None
        dtype = self.gradient_dtype
        return ArraySpec("g", dtype, numel, partition, slot, exchanged=True, replaced_by=y)

    @cached_property
    def arena(self) -> tuple[ArraySpec, ...]:
        """The arena's arrays; partitions of equal size are listed once."""
        partitions = (
            spec
            for index, each in enumerate(self.partitions)
            for spec in self.arrays_of(index, each.on_host, each.head)
        )
        return (*partitions, *self._slots())

    def _slots(self) -> Iterator[ArraySpec]:
        """Arrays that chunks of all partitions take in turn: for a gradient and then its y, and for
        weights that the worker has peeked at, on their way up."""
        for slot in range(SLOTS_OF_CHUNKS if self.is_in_transit else 0):
            yield self._gradient(self.slot_numel, OF_CHUNKS, slot)
        for slot in range(SLOTS_OF_CHUNKS if self.peeks else 0):
            dtype = self.caller.weights_dtype
            yield ArraySpec("y", dtype, self.largest_chunk, OF_CHUNKS, slot, exchanged=True)

    def times_of(self, spec: ArraySpec) -> int:
        """How many arrays a spec of `arena` stands for."""
        return 1 if spec.partition == OF_CHUNKS else self.partitions[spec.partition].times

    @cached_property
    def layout(self) -> ArenaLayout:
        return plan_layout(self.arena)

    # -- the accelerator ---------------------------------------------------------------------------

    @property
    def computes_there(self) -> bool:
        """Whether the accelerator computes the weights."""
        return self.places.gradient is Place.ACCELERATOR

    @property
    def landing_bytes(self) -> int:
        """Bytes of the landing buffers: for each element on the host the larger of a gradient and
        y, and the per-block array if the accelerator reads it."""
        if self.copies is not Copies.BESIDE_STEP:
            return 0
        dtypes = self.gradient_dtype, self.caller.weights_dtype
        item = max(DTYPE_BYTES[dtype] for dtype in dtypes)
        of_block = self.rule.per_block_bytes if self.lifts_per_block else 0
        size = self.rule.block_size
        return sum(
            each.times * (each.on_host * item + -(-each.on_host // size) * of_block)
            for each in self.partitions
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of the optimizer's state on the accelerator."""
        return sum(self.rule.head_bytes(each.head) * each.times for each in self.partitions)


def streams_in_step(plan: ZenFlowPlan) -> bool:
    """Whether a step waits for weights that could arrive in the next forward at stage 3."""
    return plan.wait is Wait.STEP and (plan.peeks or plan.predicts_in_chunks)


def y_replaces_gradient(plan: ZenFlowPlan) -> bool:
    """Whether y takes the place of the newest gradient: only if their items have equal sizes.
    Otherwise y of one element would overwrite gradients of others, which another thread may not
    have read."""
    return DTYPE_BYTES[plan.caller.weights_dtype] == DTYPE_BYTES[plan.gradient_dtype]
