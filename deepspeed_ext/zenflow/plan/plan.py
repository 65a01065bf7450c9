"""Defines the plan of a run: a frozen value that everything is built from and steps consult."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from deepspeed_ext.zenflow.plan.arrays import (
    ArenaKinds,
    ArenaLayout,
    ArraySpec,
    Dtypes,
    bytes_at_start,
    plan_layout,
    slot_arrays,
    weight_slots,
)
from deepspeed_ext.zenflow.plan.chunks import LARGEST_KERNEL_BLOCK, Chunks
from deepspeed_ext.zenflow.plan.facts import Caller, Cpus
from deepspeed_ext.zenflow.plan.places import Copies, Place, Places, Source, Wait
from deepspeed_ext.zenflow.plan.rule import RuleSettings

__all__ = ["Kernel", "PartitionPlan", "Reason", "ZenFlowPlan", "head_of"]


class Kernel(enum.Enum):
    """A device kernel that steps launch."""

    NORM = "norm of a gradient"
    STEP = "exact step of blocks"
    ESTIMATE = "estimate of an update in flight"


@dataclass(frozen=True)
class Reason:
    """A decision and why it was made.

    Attributes:
        decision: name and value, as a config would give them.
        why: the reason, in a sentence.
        is_open: whether the config left it to be decided.
        is_of_share: whether it decides the share on the accelerator, which may move later.
    """

    decision: str
    why: str
    is_open: bool = False
    is_of_share: bool = False

    def __str__(self) -> str:
        return f"{self.decision}: {self.why}"


@dataclass(frozen=True)
class PartitionPlan:
    """One partition of ZeRO, or some of equal size.

    Attributes:
        numel: number of elements.
        head: number of elements, at its start, that step on the accelerator.
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
        dtypes: dtypes of weights, gradients and y.
        partitions: this rank's partitions.
        places: where their arrays are.
        host_share: fraction of each partition that steps on the host.
        chunks: sizes of the chunks copied beside the next step; None: no such copies.
        shortage: why a host has too little memory; None: it fits, as far as is known.
        reasons: the reason of each decision, the same on every rank.
        measures_share: whether the share is chosen after steps were measured (`plan.share`).
        caller: what the ZeRO optimizer around ZenFlow does.
        cpus: CPUs of this rank's two processes; None: not known.
        saves_beside: whether checkpoints are written beside training.
        wait: what waits for exact weights.
        peeks: whether the worker computes exact weights before it steps (`transfers.stream`).
    """

    rule: RuleSettings
    dtypes: Dtypes
    partitions: tuple[PartitionPlan, ...]
    places: Places
    host_share: float
    chunks: Chunks | None
    shortage: str | None
    reasons: tuple[Reason, ...]
    caller: Caller
    measures_share: bool = False
    cpus: Cpus | None = None
    saves_beside: bool = False
    wait: Wait = Wait.STEP
    peeks: bool = False

    # -- places ------------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether exact weights are waited for where they are used, or peeked at."""
        return self.peeks or self.wait is Wait.FORWARD

    @property
    def copies(self) -> Copies:
        """What crosses the link."""
        return self.places.copies

    @property
    def source(self) -> Source:
        """Where gradients come from."""
        return self.places.source

    @property
    def decisions(self) -> tuple[object, ...]:
        """The decisions that must agree on all ranks: everything but the sizes of this rank's
        arrays."""
        places = replace(self.places, handed_over=Place.HOST)  # in transit if partitions are large
        share = self.host_share, self.measures_share
        of_weights = self.wait, self.peeks
        return (self.rule, self.dtypes, places, share, self.shortage, *of_weights)

    # -- the arena ---------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> ArenaKinds:
        """What the arrays of all partitions have in common. Gradients in transit pass through the
        slots of chunks instead of their own."""
        passes = self.places.handed_over is Place.IN_TRANSIT
        return ArenaKinds(
            layout=self.rule.layout,
            block_size=self.rule.block_size,
            dtypes=self.dtypes,
            per_block=self.rule.per_block(self.places),
            lifts_y=self.places.weights is Place.ACCELERATOR,
            slots=0 if passes else self.rule.slots(self.places.source),
        )

    @cached_property
    def arena(self) -> tuple[ArraySpec, ...]:
        """The arena's arrays; partitions of equal size are listed once."""
        partitions = (
            spec
            for index, each in enumerate(self.partitions)
            for spec in self.kinds.of(index, each.on_host, each.head)
        )
        return (*partitions, *self.slots())

    def slots(self) -> Iterator[ArraySpec]:
        """Arrays of chunks in transit, which partitions share."""
        if self.chunks is not None and self.chunks.slots:
            yield from slot_arrays(self.chunks.slots, self.chunks.slot_numel, self.dtypes)
        if self.peeks:
            total = sum(each.on_host * each.times for each in self.partitions)
            most = max((each.on_host for each in self.partitions), default=0)
            yield from weight_slots(total, most, self.rule.block_size, self.dtypes)

    @property
    def bytes_at_start(self) -> int:
        """Bytes of the arena that the worker touches at start."""
        partitions = (
            bytes_at_start(self.kinds.of(0, each.on_host)) * each.times for each in self.partitions
        )
        return sum(partitions) + bytes_at_start(self.slots())

    @cached_property
    def layout(self) -> ArenaLayout:
        """The arena with all arrays in their places."""
        return plan_layout(self.arena)

    # -- the accelerator ---------------------------------------------------------------------------

    @property
    def computes_there(self) -> bool:
        """Whether the accelerator computes the weights."""
        return self.places.gradient is Place.ACCELERATOR

    @property
    def landing_bytes(self) -> int:
        """Bytes of the landing buffers."""
        if self.copies is not Copies.BESIDE_STEP:
            return 0
        return sum(self.kinds.landing_bytes(each.on_host) * each.times for each in self.partitions)

    @property
    def head_bytes(self) -> int:
        """Bytes of the optimizer's state on the accelerator."""
        return sum(self.rule.head_bytes(each.head) * each.times for each in self.partitions)

    @property
    def has_heads(self) -> bool:
        """Whether some elements step on the accelerator."""
        return any(each.head for each in self.partitions)

    @property
    def kernels(self) -> frozenset[Kernel]:
        """Device kernels that steps launch, if the device has any."""
        if self.rule.block_size > LARGEST_KERNEL_BLOCK:
            return frozenset()
        found = {Kernel.NORM}
        if self.has_heads or (self.rule.steps_beside_worker and self.computes_there):
            found.add(Kernel.STEP)
        if self.rule.estimates and self.computes_there:
            found.add(Kernel.ESTIMATE)
        return frozenset(found)
