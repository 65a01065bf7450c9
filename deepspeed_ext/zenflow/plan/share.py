"""Computes how much of the optimizer should step on the accelerator, so that the rest is hidden and
the memory suffices, and changes a plan accordingly. Pure functions.

A plan begins with everything on the host. Once steps are measured, a share can move, because the
host's arrays may begin behind elements that are not theirs (`ArraySpec.before`): the rest keeps its
place in the arena.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.arrays import ArenaLayout, PlacedArray
from deepspeed_ext.zenflow.plan.partitions import head_of
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import Reason, ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = [
    "HIDDEN",
    "MEASURED_STEPS",
    "UNITS",
    "WATCHED_STEPS",
    "ChainTimes",
    "fitting_units",
    "hiding_units",
    "is_worth_it",
    "relaid",
    "share_reason",
    "step_seconds",
    "with_copies_inside",
    "with_heads",
    "with_host_share",
    "with_threads",
]

UNITS = 1024
"""A chosen share is a multiple of one over this."""

MEASURED_STEPS = 8
"""Successive synchronous steps to measure before a share moves; the first two touch memory and warm
caches."""

WATCHED_STEPS = 6
"""Overlapped steps to measure before a share moves, if the first of them comes soon: they show how
much the pass slows forward and backward."""

HIDDEN = 0.95
"""Fraction of the accelerator's time that the optimizer's chain may take."""

LEAST_MOVED = 1 / 32
"""A smaller share on the accelerator is not worth a move."""


@dataclass(frozen=True)
class ChainTimes:
    """One rank's measured times, in seconds, with all elements on the host.

    Attributes:
        device: the accelerator's time between two optimizer steps, with no pass beside it.
        worker: the pass, per step; without landing buffers, everything that runs beside the step.
        link: the copies beside the step, in the slower direction; without landing buffers, what the
            step waits for.
        fixed: the part of the chain of copies and pass that does not depend on the number of
            elements.
        contention: seconds by which a second of the pass delays the accelerator, because both need
            the host's cores and memory; at least 0, below 1.
        there: an exact step of all elements on the accelerator.
    """

    device: float
    worker: float
    link: float = 0.0
    fixed: float = 0.0
    contention: float = 0.0
    there: float = 0.0

    def beside(self, host_share: float) -> float:
        """`device` while the host passes over `host_share` of the elements."""
        delayed = self.device + self.contention * self.worker * host_share
        return min(delayed, self.device / (1.0 - self.contention))


def hiding_units(plan: ZenFlowPlan, times: ChainTimes) -> int:
    """How much may step on the host, of `UNITS`, without making the accelerator wait; 0 if it
    always waits."""
    if not plan.rule.overlapped or plan.copies is not Copies.BESIDE_STEP:
        return 0
    slowest = max(times.worker, times.link) - HIDDEN * times.contention * times.worker
    if slowest == 0.0:
        return UNITS
    share = (HIDDEN * times.device - times.fixed) / slowest
    return max(0, min(UNITS, math.floor(share * UNITS)))


def fitting_units(plan: ZenFlowPlan, room: int, now: ZenFlowPlan | None = None) -> int:
    """How much must step on the host, of `UNITS`, so that the rest fits into `room` bytes of the
    accelerator above the peak of a step. `UNITS` if nothing fits.

    Args:
        now: the plan of that step; None: `plan`.
    """
    before = _accelerator_bytes(now or plan)
    units = range(UNITS + 1)
    fitting = bisect_right(
        units,
        max(0, room) + before,
        key=lambda there: _accelerator_bytes(with_host_share(plan, 1.0 - there / UNITS, "")),
    )
    return UNITS - max(0, fitting - 1)


def _accelerator_bytes(plan: ZenFlowPlan) -> int:
    return plan.held.share_bytes + plan.held.landing_bytes


def with_copies_inside(plan: ZenFlowPlan) -> ZenFlowPlan:
    """`plan` without landing buffers: gradients and y are copied inside the step, and are whole on
    the host."""
    places = replace(plan.places, published=Place.HOST, handed_over=Place.HOST)
    partitions = tuple(replace(each, places=places) for each in plan.partitions)
    why = "landing buffers gave way to a larger share of the optimizer"
    reason = Reason(f"copies {Copies.INSIDE_STEP.value}", why, True, "copies")
    reasons = _with_reason(plan, reason)
    return replace(plan, partitions=partitions, chunks=None, reasons=reasons)


def step_seconds(plan: ZenFlowPlan, host_share: float, times: ChainTimes) -> float:
    """Seconds of a step of `plan` on one rank, with this share."""
    worker, link = times.worker * host_share, times.link * host_share
    device, there = times.beside(host_share), times.there * (1.0 - host_share)
    if not plan.rule.overlapped:
        if plan.copies is Copies.BESIDE_STEP:
            return device + max(worker, link) + times.fixed + there
        return device + link + worker + there
    if plan.copies is Copies.BESIDE_STEP:
        return max(device, max(worker, link) + times.fixed) + there
    return device + link + max(0.0, worker - device) + there


def is_worth_it(plan: ZenFlowPlan, host_share: float) -> bool:
    """Whether moving from `plan` to this share is worth it."""
    return plan.host_share - host_share >= LEAST_MOVED


def with_host_share(plan: ZenFlowPlan, host_share: float, why: str) -> ZenFlowPlan:
    """`plan` with this share of each partition on the host; everything else stays in place."""
    block_size = plan.rule.block_size
    heads = [head_of(each.numel, host_share, block_size) for each in plan.partitions]
    return with_heads(plan, heads, host_share, why)


def with_heads(plan: ZenFlowPlan, heads: Sequence[int], host_share: float, why: str) -> ZenFlowPlan:
    """`with_host_share`, given how many elements of each partition step on the accelerator."""
    pairs = zip(plan.partitions, heads, strict=True)
    partitions = tuple(replace(each, head=head) for each, head in pairs)
    reason = share_reason(host_share, why, is_open=True)
    return replace(
        plan,
        partitions=partitions,
        host_share=host_share,
        reasons=_with_reason(plan, reason),
        measures_share=False,
    )


def _with_reason(plan: ZenFlowPlan, reason: Reason) -> tuple[Reason, ...]:
    """The plan's reasons, with `reason` in place of the one about the same."""
    return (*(each for each in plan.reasons if each.about != reason.about), reason)


def share_reason(host_share: float, why: str, *, is_open: bool = False) -> Reason:
    """Why `host_share` of each partition steps on the host."""
    return Reason(f"offload_optimizer.ratio = {host_share:.4g}", why, is_open, "share")


def with_threads(plan: ZenFlowPlan, threads: int) -> ZenFlowPlan:
    """`plan` with this many threads of the optimizer process."""
    return plan if plan.cpus is None else replace(plan, cpus=plan.cpus._replace(threads=threads))


def relaid(layout: ArenaLayout, plan: ZenFlowPlan) -> ArenaLayout:
    """`layout` with the arrays of `plan`, which has fewer elements on the host.

    An array with elements before it begins that much later. The others stay in place: they hold
    nothing that the next step reads.
    """
    found = {array.spec.key: array for array in layout.arrays}
    arrays = []
    for spec in plan.arena:
        was, offset = found[spec.key]
        further = (spec.before - was.before) * DTYPE_BYTES[spec.dtype]
        assert further >= 0, "elements move to the accelerator, not back"
        assert spec.before + spec.numel <= was.before + was.numel, "an array does not grow"
        arrays.append(PlacedArray(spec, offset + further))
    return ArenaLayout(tuple(arrays), layout.nbytes)
