"""Says how long a step's copies and its pass take, and how much of that every step waits for;
chooses, from measured steps, how much of the optimizer steps on the accelerator; and says what
limits a step. Pure functions.

A step's chain is: gradients down the link, the optimizer's pass over host memory, y up the link.
All three work at once, chunk by chunk, so the slowest of them decides. What runs beside the next
forward and backward is hidden if these take at least as long; the rest is exposed in every step.
What steps on the accelerator takes no time here.

Exact weights that arrive in the forward (`transfers.stream`) add it to the chain: a module runs
when its last chunk has arrived, and the next chunk arrives meanwhile. With n equal chunks, whose
ways down, peek and way up take d, k and u in all, and a forward of f, the forward ends

    (d + k + u + f) / n + (n - 1) / n max(d, k, u, f)

after the gradients are complete: all four work at once, but for the first chunk. The passes, w in
all, follow in reverse order and end before backward, b, needs the slots of their gradients. So a
step waits the larger of

    (d + k + u) / n + (n - 1) / n max(0, max(d, k, u) - f)   and   max(d, k) + w - f - b.

Gradients that arrive in backward have no way down there; d counts beside k where they do not. If w
is longer than b, only the part b / w is peeked at and the rest passed at once (Note: [how many
chunks are peeked at] in `transfers.chunks`): k is then longer, and less follows it. At stages 1 and
2 the step itself waits for the peek and the way up.

Not counted: the first and the last chunk of other chains, in which only one of the three works
(1/64 of each), launches, the waits of a link that several accelerators share, and, under the exact
rule, modules that are larger than a chunk.

A run that measures begins with everything on the host. Its synchronous steps show the accelerator's
time without a pass beside it, and how many threads the pass likes; the overlapped ones after them
how long pass and copies take, and by how much they delay the accelerator (`ChainTimes`). From that
follows the largest share that the host can step unnoticed (`chosen_share`). Everything is measured
and chosen once; `step.first_steps` does so at run time.

A share can move because the host's arrays may begin behind elements that are not theirs
(`ArraySpec.before`): the rest keeps its place in the arena.
"""

from __future__ import annotations

import enum
import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.held import Held, nbytes_of
from deepspeed_ext.zenflow.plan.places import Copies, Place, Wait, chunk_numel
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, head_of
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

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
"""Fraction of the accelerator's time that the optimizer's chain may take. The rest covers the chunk
that a step waits for."""

LEAST_GAINED = 0.03
"""Fraction by which a step must get shorter for more of the optimizer on the accelerator than hides
the rest, and by which fewer threads must be faster."""

LEAST_MOVED = 1 / 32
"""A smaller share on the accelerator is not worth a move."""

MOST_CONTENTION = 0.9

NOT_LIMITED = 0.05
"""A step that the optimizer makes longer by less than this fraction counts as not limited by it."""


# -- what follows from speeds ---------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes per element of a rank's partition in an optimizer step: over the link, and in host
    memory, by the optimizer's pass and by a peek."""

    down: float
    up: float
    passed: float
    peeked: float


@dataclass(frozen=True)
class Lanes:
    """Seconds of an optimizer step on one rank beside forward and backward.

    Attributes:
        down, up, host: copies over the link, and the pass over host memory.
        exposed: what every step waits for, however long forward and backward take.
        beside: what is hidden if forward and backward take at least as long.
        forward, backward: how much of a second of the forward, and of backward, hides.
        within: what has to end within the whole step, the waits included.
        peek: peeks at everything, if they may be left out.
    """

    down: float
    up: float
    host: float
    exposed: float
    beside: float
    forward: float = 1.0
    backward: float = 1.0
    within: float = 0.0
    peek: float = 0.0

    def waits(self, forward: float, backward: float) -> float:
        """Seconds by which the optimizer makes a step longer that computes for so many seconds."""
        hidden = self.forward * forward + self.backward * backward
        at_once = max(0.0, 1.0 - backward / self.host) if self.peek else 0.0
        first = self.forward * (self.peek + at_once * (self.host - self.peek))
        waited = self.exposed + max(0.0, self.beside - hidden, first - hidden)
        return max(waited, self.within - at_once * self.peek - forward - backward)


def traffic_of(plan: ZenFlowPlan) -> Traffic:
    """What a step moves: every gradient goes down; y, and what estimates are made from, come up. A
    pass reads and writes the state, reads the gradient and writes y, after a peek once more."""
    rule, size = plan.rule, plan.rule.block_size
    state = rule.head_bytes(size) / size
    means = rule.per_block_bytes / size if rule.estimates else 0.0
    gradient, y = DTYPE_BYTES[plan.gradient_dtype], DTYPE_BYTES[plan.caller.weights_dtype]
    return Traffic(gradient, y + means, gradient + 2 * state + y + means, gradient + state + y)


def lanes_of(plan: ZenFlowPlan, link: float, host: float) -> Lanes:
    """How long the chain takes, and how much of it a step can hide.

    With landing buffers all of it can be hidden, without them only the pass. If the host predicts
    weights that stay there, its estimate is exposed, which reads gradients and y and writes
    weights. Those for an accelerator arrive as peeked ones do, hidden behind the forward alone.

    Args:
        link: bytes per second between an accelerator and its host, each way, both ways at once.
        host: bytes per second that a rank's passes move in the host's memory while copies run
            beside them; reads and writes count alike. So the bytes of copies do not count against
            it.
    """
    moves, item = traffic_of(plan), DTYPE_BYTES[plan.caller.weights_dtype]
    numel = sum(each.on_host * each.times for each in plan.partitions)
    down, up, sent = (nbytes * numel / link for nbytes in (moves.down, moves.up, item))
    passed, transfer = moves.passed * numel / host, max(down, up)
    if plan.peeks:
        return _peeked(plan, down, moves.peeked * numel / host, passed, up, numel)
    estimate = (moves.down + 2 * item) * numel / host
    if plan.predicts_in_chunks:
        return _peeked(plan, down, estimate, passed, sent, numel)
    if not plan.rule.overlapped:
        return Lanes(down, up, passed, max(transfer, passed), 0.0)
    if plan.copies is Copies.BESIDE_STEP:
        return Lanes(down, up, passed, 0.0, max(transfer, passed))
    if plan.copies is Copies.INSIDE_STEP:
        return Lanes(down, up, passed, transfer, passed)
    sent = sent if plan.copies is Copies.WEIGHTS else 0.0
    return Lanes(down, max(up, sent), passed, max(estimate, sent), max(down, passed))


def _peeked(
    plan: ZenFlowPlan, down: float, peek: float, host: float, up: float, numel: int
) -> Lanes:
    """The lanes of steps whose weights are peeked at, or predicted by the host."""
    down = down if plan.copies is Copies.INSIDE_STEP else 0.0
    up = 0.0 if plan.copies is Copies.NONE else up
    first = min(1.0, chunk_numel(numel, plan.rule.block_size) / max(1, numel))
    begins, rest = first * (down + peek + up), (1.0 - first) * max(down, peek, up)
    if plan.wait is Wait.STEP:
        return Lanes(down, up, host, begins + rest, host)
    within, left_out = max(down, peek) + host, peek if plan.peeks else 0.0
    return Lanes(down, up, host, begins, rest, 1.0 - first, 0.0, within, left_out)


# -- what is measured ----------------------------------------------------------------------------


class Limit(enum.IntEnum):
    """What makes a step longer than one without the optimizer; metrics show its number."""

    NOTHING = 0
    WORKER = 1
    LINK = 2
    GATHER = 3
    STEP = 4
    """The step's own work on the accelerator."""


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


def limit_line(
    step: MeasuredStep, cores: tuple[int, int] | None = None, *, streams: bool = False
) -> str:
    """What limits `step`, in one line.

    Args:
        cores: those of the optimizer process, and all of its rank; None: not known.
        streams: whether the step waits for weights that stage 3 lets arrive in the next forward.
    """
    of_cores = "" if cores is None else " ({} of {} cores)".format(*cores)
    told = _TOLD[step.limit].format(cores=of_cores)
    if streams and (most := round(step.exposed_copies * 1e3)):
        told += f"; at stage 3 the next forward would hide up to {most} ms of it"
    return f"ZenFlow: a step takes {step.slowdown:.2f}x its time without the optimizer; {told}"


@dataclass(frozen=True)
class ChainTimes:
    """One rank's measured times, in seconds, with all elements on the host.

    Attributes:
        device: the accelerator's time between two optimizer steps, with no pass beside it.
        worker: the pass, per step.
        link: the copies, in the slower direction.
        contention: seconds by which a second of the pass delays the accelerator, because both need
            the host's cores and memory; at least 0, below 1.
        there: an exact step of all elements on the accelerator.
    """

    device: float
    worker: float
    link: float = 0.0
    contention: float = 0.0
    there: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether there is enough to choose from."""
        return all(map(math.isfinite, vars(self).values())) and min(self.device, self.worker) > 0.0

    def step(self, plan: ZenFlowPlan, share: float) -> float:
        """Duration of a step of `plan` with this share of the elements on the host."""
        worker, link, there = self.worker * share, self.link * share, self.there * (1.0 - share)
        delayed = self.device + self.contention * worker
        device = min(delayed, self.device / (1.0 - self.contention))
        is_beside = plan.copies is Copies.BESIDE_STEP
        if not plan.rule.overlapped:
            return device + (max(worker, link) if is_beside else link + worker) + there
        if is_beside:
            return max(device, worker, link) + there
        return device + link + max(0.0, worker - device) + there


def times_of(
    plan: ZenFlowPlan, alone: MeasuredStep | None, beside: MeasuredStep | None
) -> ChainTimes:
    """Scale a rank's measurements to a step with all elements on the host.

    Args:
        alone: a synchronous step. None: there were none, so how much the pass delays the
            accelerator is not known.
        beside: an overlapped step; None: steps do not overlap.
    """
    step = beside or alone
    if step is None:
        return ChainTimes(0.0, 0.0)
    on_host = sum(each.on_host for each in plan.partitions)
    scale = sum(each.numel for each in plan.partitions) / max(1, on_host)
    moves, contention = traffic_of(plan), 0.0
    slower_way = max(moves.down, moves.up) / (moves.down + moves.up)
    if alone is not None and beside is not None and (both := min(beside.worker, beside.device)):
        contention = min(MOST_CONTENTION, max(0.0, beside.device - alone.device) / both)
    # An exact step on the accelerator moves 28 bytes per element, with fp32 moments, where an
    # estimate moves 6. Both are bound by memory.
    item, size = DTYPE_BYTES[plan.caller.weights_dtype], plan.rule.block_size
    estimated = DTYPE_BYTES[plan.gradient_dtype] + 2 * item
    stepped = 2 * plan.rule.head_bytes(size) / size + estimated - item
    return ChainTimes(
        step.device if alone is None else alone.device,
        scale * step.worker,
        scale * slower_way * (step.link or step.exposed_copies),
        contention,
        stepped / estimated * scale * step.estimate,
    )


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
    probed = probed_threads(counts)
    if len(seconds) < len(probed):
        return counts[0]
    passes = list(zip(probed, seconds, strict=False))
    typical = {
        count: statistics.median(passed for probed, passed in passes if probed == count)
        for count in counts
    }
    best = counts[0]
    for count in counts[1:]:
        best = count if typical[count] < (1.0 - LEAST_GAINED) * typical[best] else best
    return best


# -- the choice ----------------------------------------------------------------------------------


def accelerator_bytes(plan: ZenFlowPlan) -> int:
    """What ZenFlow holds on the accelerator between two steps."""
    return nbytes_of(Held(plan).held(Place.ACCELERATOR))


def least_units(plan: ZenFlowPlan, room: int) -> int:
    """How much must step on the host, of `UNITS`, so that the rest fits into `room` bytes of the
    accelerator above what `plan` takes. `UNITS` if nothing fits."""
    fitting = bisect_right(
        range(UNITS + 1),
        max(0, room) + accelerator_bytes(plan),
        key=lambda there: accelerator_bytes(with_host_share(plan, 1.0 - there / UNITS, "")),
    )
    return UNITS - max(0, fitting - 1)


def hiding_units(plan: ZenFlowPlan, times: ChainTimes) -> int:
    """How much may step on the host, of `UNITS`, without making the accelerator wait; 0 if it
    always waits."""
    if not plan.rule.overlapped or plan.copies is not Copies.BESIDE_STEP:
        return 0
    slowest = max(times.worker, times.link) - HIDDEN * times.contention * times.worker
    return min(UNITS, math.floor(HIDDEN * times.device / slowest * UNITS)) if slowest else UNITS


def chosen_share(plan: ZenFlowPlan, ranks: Sequence[tuple[ChainTimes, int]]) -> tuple[float, str]:
    """The share of the optimizer on the host that makes steps shortest, and why. All ranks find the
    same. Elements never move back, and none move where steps would get longer.

    The largest share that hides comes first, because it moves least; then the smallest that fits,
    because the accelerator is delayed by every element of a pass.

    Args:
        ranks: of each rank what it has measured, and the `least_units` of its own plan.
    """
    now, of_all = plan.host_share, [times for times, _ in ranks]
    if not all(times.is_complete for times in of_all):
        return now, "a rank could not measure its steps"
    least = min(max(units for _, units in ranks) / UNITS, now)
    hiding = min(hiding_units(plan, times) for times in of_all) / UNITS

    def seconds(share: float) -> float:
        return max(times.step(plan, share) for times in of_all)

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


# -- what a plan becomes -------------------------------------------------------------------------


def with_host_share(plan: ZenFlowPlan, host_share: float, why: str) -> ZenFlowPlan:
    """`plan` with this share of each partition on the host; everything else stays in place."""
    block_size = plan.rule.block_size
    heads = [head_of(each.numel, host_share, block_size) for each in plan.partitions]
    return with_heads(plan, heads, host_share, why)


def with_heads(plan: ZenFlowPlan, heads: Sequence[int], host_share: float, why: str) -> ZenFlowPlan:
    """`with_host_share`, given how many elements of each partition step on the accelerator."""
    pairs = zip(plan.partitions, heads, strict=True)
    return replace(
        plan,
        partitions=tuple(replace(each, head=head) for each, head in pairs),
        host_share=host_share,
        share_reason=share_reason(host_share, why),
        measures_share=False,
    )


def share_reason(host_share: float, why: str) -> str:
    """Why `host_share` of each partition steps on the host."""
    return f"offload_optimizer.ratio = {host_share:.4g}: {why}"
