"""Chooses, from measured steps, how much of the optimizer steps on the accelerator, and says what
limits a step. Pure functions.

A run that measures begins with everything on the host. Its synchronous steps show the accelerator's
time without a pass beside it, and how many threads the pass likes; the overlapped ones after them
how long pass and copies take, and by how much they delay the accelerator (`ChainTimes`). From that
follows the largest share that the host can step unnoticed (`chosen_share`). Everything is measured
and chosen once; `zenflow.first_steps` does so at run time.

A share can move because the host's arrays may begin behind elements that are not theirs
(`ArraySpec.before`): the rest keeps its place in the arena.
"""

from __future__ import annotations

import enum
import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.lanes import traffic_of
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import Reason, ZenFlowPlan, head_of
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = [
    "HIDDEN",
    "LEAST_GAINED",
    "MEASURED_STEPS",
    "SETTLING_STEPS",
    "UNITS",
    "WATCHED_STEPS",
    "ChainTimes",
    "Limit",
    "MeasuredStep",
    "best_threads",
    "chosen_share",
    "least_units",
    "hiding_units",
    "limit_line",
    "probed_threads",
    "share_reason",
    "thread_counts",
    "times_of",
    "with_heads",
    "with_host_share",
    "with_threads",
]

UNITS = 1024
"""A chosen share is a multiple of one over this."""

SETTLING_STEPS = 2
"""The first steps, which touch memory and warm caches: they are not measured."""

_PROBED_STEPS = 6
"""Synchronous steps after those, whose passes run with several thread counts."""

MEASURED_STEPS = SETTLING_STEPS + _PROBED_STEPS

WATCHED_STEPS = 6
"""Overlapped steps to measure."""

HIDDEN = 0.95
"""Fraction of the accelerator's time that the optimizer's chain may take."""

LEAST_GAINED = 0.03
"""Fraction by which a step must get shorter for more of the optimizer on the accelerator than hides
the rest, and by which fewer threads must be faster."""

LEAST_MOVED = 1 / 32
"""A smaller share on the accelerator is not worth a move."""

MOST_CONTENTION = 0.9

NOT_LIMITED = 0.05
"""A step that the optimizer makes longer by less than this fraction counts as not limited by it."""


# -- what is measured ----------------------------------------------------------------------------


class Limit(enum.IntEnum):
    """What makes a step longer than one without the optimizer; metrics show its number."""

    NOTHING = 0
    WORKER = 1
    LINK = 2
    GATHER = 3
    STEP = 4
    """The step's own work on the accelerator."""


@dataclass(frozen=True)
class MeasuredStep:
    """A typical step of one rank, in seconds.

    Attributes:
        device: from the end of one optimizer step to the start of the next.
        inside: duration of the optimizer step.
        wait: the part of `inside` in which the accelerator waited for the worker or for copies.
        worker: duration of the worker's pass.
        link: duration of copies beside the step; 0: they run inside, or there are none.
        gather: the part of `inside` between the weights and the end of the step.
        estimate: the part of `inside` that estimates the weights of elements on the host.
    """

    device: float
    inside: float
    wait: float
    worker: float
    link: float = 0.0
    gather: float = 0.0
    estimate: float = 0.0

    @property
    def slowdown(self) -> float:
        """Its duration divided by that of a step without the optimizer."""
        return (self.device + self.inside) / self.device

    @property
    def limit(self) -> Limit:
        """What takes the largest part of the optimizer step."""
        if self.slowdown < 1.0 + NOT_LIMITED:
            return Limit.NOTHING
        own = self.inside - self.wait - self.gather
        if self.wait < max(own, self.gather):
            return Limit.STEP if own >= self.gather else Limit.GATHER
        if self.link:
            return Limit.WORKER if self.worker >= self.link else Limit.LINK
        return Limit.WORKER if self.wait >= 2 * self.exposed_copies else Limit.LINK

    @property
    def exposed_copies(self) -> float:
        """The part of `wait` spent on copies inside the step: what is not explained by a worker
        slower than the accelerator."""
        busy = self.device + self.inside - self.wait
        return 0.0 if self.link else max(0.0, self.wait - max(0.0, self.worker - busy))


_TOLD = {
    Limit.NOTHING: "nothing limits it",
    Limit.WORKER: (
        "the optimizer process limits it{cores}: fewer pt_reserved_cores, state_dtype bfloat16, or "
        "more work per step make it shorter"
    ),
    Limit.LINK: (
        "the link to the host limits it: more work per step, or more of the optimizer on the "
        "accelerator (offload_optimizer.ratio), make it shorter"
    ),
    Limit.GATHER: "the gather of the weights limits it",
    Limit.STEP: "the step's own work on the accelerator limits it",
}


def limit_line(step: MeasuredStep, cores: tuple[int, int] | None = None) -> str:
    """What limits `step`, in one line.

    Args:
        cores: those of the optimizer process, and all of its rank; None: not known.
    """
    told = _TOLD[step.limit].format(
        cores="" if cores is None else " ({} of {} cores)".format(*cores)
    )
    return f"ZenFlow: a step takes {step.slowdown:.2f}x its time without the optimizer; {told}"


@dataclass(frozen=True)
class ChainTimes:
    """One rank's measured times, in seconds, with all elements on the host.

    Attributes:
        device: the accelerator's time between two optimizer steps, with no pass beside it.
        worker: the pass, per step.
        link: the copies, in the slower direction.
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

    @property
    def is_complete(self) -> bool:
        """Whether there is enough to choose from."""
        return all(map(math.isfinite, vars(self).values())) and min(self.device, self.worker) > 0.0

    def beside(self, host_share: float) -> float:
        """`device` while the host passes over `host_share` of the elements."""
        delayed = self.device + self.contention * self.worker * host_share
        return min(delayed, self.device / (1.0 - self.contention))


def times_of(
    plan: ZenFlowPlan, alone: MeasuredStep | None, beside: MeasuredStep | None
) -> ChainTimes:
    """Scale a rank's measurements to a step with all elements on the host.

    Args:
        plan: the plan of those steps.
        alone: a synchronous step. None: there were none, so how much the pass delays the
            accelerator is not known.
        beside: an overlapped step; None: steps do not overlap.
    """
    step = beside or alone
    if step is None:
        return ChainTimes(0.0, 0.0)
    scale = sum(each.numel for each in plan.partitions) / max(1, _on_host(plan))
    link = scale * _slower_way(plan, step.link or step.exposed_copies)
    device, fixed, contention = step.device, 0.0, 0.0
    if alone is not None:
        device = alone.device
        # a synchronous step waits for all copies, an overlapped one for those of one chunk
        chunks = (
            0
            if plan.chunks is None
            else sum(-(-each.on_host // plan.chunks.numel) for each in plan.partitions)
        )
        fixed = max(0.0, alone.wait - alone.worker) / chunks if chunks else 0.0
    if alone is not None and beside is not None and (both := min(beside.worker, beside.device)):
        contention = min(MOST_CONTENTION, max(0.0, beside.device - alone.device) / both)
    there = _exact_over_estimate(plan) * scale * step.estimate
    return ChainTimes(device, scale * step.worker, link, fixed, contention, there)


def _on_host(plan: ZenFlowPlan) -> int:
    return sum(each.on_host for each in plan.partitions)


def _slower_way(plan: ZenFlowPlan, both: float) -> float:
    """The seconds of the slower direction, of `both` seconds of copies in both."""
    moves = traffic_of(plan)
    return both * max(moves.down, moves.up) / (moves.down + moves.up)


def _exact_over_estimate(plan: ZenFlowPlan) -> float:
    """Bytes of an exact step on the accelerator over those of an estimate: 28 and 6 per element
    with fp32 moments. Both are bound by memory."""
    dtypes, block_size = plan.dtypes, plan.rule.block_size
    gradient, published = DTYPE_BYTES[dtypes.gradient], DTYPE_BYTES[dtypes.published]
    weights = DTYPE_BYTES[dtypes.weights]
    stepped = 2 * plan.rule.head_bytes(block_size) / block_size + gradient + weights
    return stepped / (gradient + published + weights)


# -- threads -------------------------------------------------------------------------------------


def thread_counts(most: int) -> tuple[int, ...]:
    """The thread counts to try, at most three, the largest first."""
    return tuple(dict.fromkeys(max(1, count) for count in (most, most * 3 // 4, most // 2)))


def probed_threads(counts: Sequence[int]) -> list[int]:
    """The thread count of the pass of each of `_PROBED_STEPS` steps."""
    return [count for count in counts for _ in range(_PROBED_STEPS // len(counts))]


def best_threads(counts: Sequence[int], seconds: Sequence[float]) -> int:
    """The count with the shortest passes: the first, unless a later one is clearly faster, or not
    all were measured.

    Args:
        seconds: of the passes with `probed_threads`, as far as there were such steps.
    """
    passes: Mapping[int, list[float]] = {count: [] for count in counts}
    for count, each in zip(probed_threads(counts), seconds, strict=False):
        passes[count].append(each)
    best, *others = counts
    if all(passes.values()) and len(seconds) >= len(probed_threads(counts)):
        for count in others:
            least = (1.0 - LEAST_GAINED) * statistics.median(passes[best])
            best = count if statistics.median(passes[count]) < least else best
    return best


# -- the choice ----------------------------------------------------------------------------------


def least_units(plan: ZenFlowPlan, room: int) -> int:
    """How much must step on the host, of `UNITS`, so that the rest fits into `room` bytes of the
    accelerator above the peak of a step of `plan`. `UNITS` if nothing fits."""
    fitting = bisect_right(
        range(UNITS + 1),
        max(0, room) + _accelerator_bytes(plan),
        key=lambda there: _accelerator_bytes(with_host_share(plan, 1.0 - there / UNITS, "")),
    )
    return UNITS - max(0, fitting - 1)


def _accelerator_bytes(plan: ZenFlowPlan) -> int:
    return plan.head_bytes + plan.landing_bytes


def chosen_share(plan: ZenFlowPlan, ranks: Sequence[tuple[ChainTimes, int]]) -> tuple[float, str]:
    """The share of the optimizer on the host that makes steps shortest, and why. All ranks find the
    same. Elements never move back, and none move where steps would get longer.

    The largest share that hides comes first, because it moves least; then the smallest that fits,
    because the accelerator is delayed by every element of a pass.

    Args:
        ranks: of each rank what it has measured, and the `least_units` of its own plan.
    """
    now = plan.host_share
    of_all = [times for times, _ in ranks]
    if not all(times.is_complete for times in of_all):
        return now, "a rank could not measure its steps"
    least = min(max(units for _, units in ranks) / UNITS, now)
    hiding = min(hiding_units(plan, times) for times in of_all) / UNITS

    def seconds(share: float) -> float:
        return max(_step_seconds(plan, share, times) for times in of_all)

    share = min(now, max(least, hiding))
    share = least if seconds(least) < (1.0 - LEAST_GAINED) * seconds(share) else share
    slowest = max(of_all, key=lambda times: times.worker)
    why = (
        f"a pass over all elements takes {slowest.worker * 1e3:.1f} ms, copies "
        f"{slowest.link * 1e3:.1f} ms, the accelerator {slowest.device * 1e3:.1f} ms between "
        f"two steps, and every rank has room for {1.0 - least:.1%} of its optimizer"
    )
    if slowest.contention:
        why = f"{why}; a second of a pass delays the accelerator by {slowest.contention:.2f} s"
    is_worth_it = now - share >= LEAST_MOVED and seconds(share) <= seconds(now)
    return (share if is_worth_it else now), why


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


def _step_seconds(plan: ZenFlowPlan, host_share: float, times: ChainTimes) -> float:
    """Seconds of a step of `plan` on one rank, with this share."""
    worker, link = times.worker * host_share, times.link * host_share
    device, there = times.beside(host_share), times.there * (1.0 - host_share)
    is_beside = plan.copies is Copies.BESIDE_STEP
    chain = max(worker, link) + times.fixed
    if not plan.rule.overlapped:
        return device + (chain if is_beside else link + worker) + there
    if is_beside:
        return max(device, chain) + there
    return device + link + max(0.0, worker - device) + there


# -- what a plan becomes -------------------------------------------------------------------------


def with_host_share(plan: ZenFlowPlan, host_share: float, why: str) -> ZenFlowPlan:
    """`plan` with this share of each partition on the host; everything else stays in place."""
    block_size = plan.rule.block_size
    heads = [head_of(each.numel, host_share, block_size) for each in plan.partitions]
    return with_heads(plan, heads, host_share, why)


def with_heads(plan: ZenFlowPlan, heads: Sequence[int], host_share: float, why: str) -> ZenFlowPlan:
    """`with_host_share`, given how many elements of each partition step on the accelerator."""
    pairs = zip(plan.partitions, heads, strict=True)
    partitions = tuple(replace(each, head=head) for each, head in pairs)
    kept = (each for each in plan.reasons if not each.is_of_share)
    return replace(
        plan,
        partitions=partitions,
        host_share=host_share,
        reasons=(*kept, share_reason(host_share, why, is_open=True)),
        measures_share=False,
    )


def share_reason(host_share: float, why: str, *, is_open: bool = False) -> Reason:
    """Why `host_share` of each partition steps on the host."""
    return Reason(f"offload_optimizer.ratio = {host_share:.4g}", why, is_open, is_of_share=True)


def with_threads(plan: ZenFlowPlan, threads: int) -> ZenFlowPlan:
    """`plan` with this many threads of the optimizer process."""
    if plan.cpus is None or plan.cpus.threads == threads:
        return plan
    return replace(plan, cpus=plan.cpus._replace(threads=threads))
