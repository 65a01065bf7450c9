"""Derives arrays and bytes from the sizes of partitions."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.zenflow.plan.arrays import ArenaKinds, Dtypes
from deepspeed_ext.zenflow.plan.places import Place, Places
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["PartitionPlan", "head_of", "kinds_of", "landing_bytes", "head_bytes"]


@dataclass(frozen=True)
class PartitionPlan:
    """One partition of ZeRO, or some of equal size.

    Attributes:
        numel: number of elements.
        head: number of elements, at its start, that step on the accelerator.
        places: where the arrays of the rest are.
        times: number of such partitions; above 1 only in a plan that nothing is built from.
    """

    numel: int
    head: int
    places: Places
    times: int = 1

    @property
    def on_host(self) -> int:
        """Elements that step on the host."""
        return self.numel - self.head


def kinds_of(rule: RuleSettings, dtypes: Dtypes, places: Places) -> ArenaKinds:
    """The arrays of partitions with these places. Gradients in transit pass through the slots of
    chunks instead."""
    slots = 0 if places.handed_over is Place.IN_TRANSIT else rule.slots(places.arrival)
    return ArenaKinds(
        layout=rule.layout,
        block_size=rule.block_size,
        dtypes=dtypes,
        per_block=rule.per_block(places),
        lifts_y=places.weights is Place.ACCELERATOR,
        slots=slots,
    )


def landing_bytes(kinds: ArenaKinds, numel: int) -> int:
    """Bytes of the landing buffer of a partition of `numel` elements on the host: 2 per element if
    gradients and y have 16 bits, plus the per-block array if the accelerator reads it."""
    item = max(DTYPE_BYTES[kinds.dtypes.gradient], DTYPE_BYTES[kinds.dtypes.published])
    entries = -(-numel // kinds.block_size) * kinds.layout.per_block_width(kinds.block_size)
    per_block = entries * DTYPE_BYTES[kinds.per_block.dtype] if kinds.per_block.exchanged else 0
    return numel * item + per_block


def head_bytes(rule: RuleSettings, numel: int) -> int:
    """Bytes of accelerator memory of `numel` elements, whole blocks, that step there: p, the
    moments in their own dtype, and a byte for each scale of codes."""
    scales = len(rule.layout.scales) * (numel // rule.block_size)
    return sum(DTYPE_BYTES[dtype] for _, dtype in rule.layout.arrays) * numel + scales


def head_of(numel: int, ratio: float, block_size: int) -> int:
    """How many of a partition's `numel` elements step on the accelerator: whole blocks, as near as
    possible to all but `ratio` of them."""
    wanted = round(numel * (1.0 - ratio) / block_size) * block_size
    return min(wanted, numel // block_size * block_size)
