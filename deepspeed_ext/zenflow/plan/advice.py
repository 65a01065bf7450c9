"""Says what limits a measured step, and what would help: pure functions over plain values.

Changes that affect numerics are only suggested, with gain and price, never made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.lanes import traffic_of
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.share import with_host_share

__all__ = [
    "NOT_WORTH",
    "Advice",
    "Cores",
    "Limit",
    "MeasuredStep",
    "Remedy",
    "advise",
    "remedies_of",
]

NOT_WORTH = 0.05
"""A step that the optimizer makes longer by less than this fraction counts as not limited by it."""

ENOUGH = 0.02
"""A remedy within this slowdown of the best one is as good."""

CORES_OF_PYTORCH = 2
"""Fewer cores than this are not suggested for PyTorch."""

SHARES = (0.875, 0.75, 0.625, 0.5, 0.25, 0.0)
"""Fractions of the optimizer on the host that may be suggested."""

_BF16_PRICE = "but rounds both moments at random"


class Limit(enum.IntEnum):
    """What makes a step longer than one without the optimizer; metrics show its number."""

    NOTHING = 0
    WORKER = 1
    LINK = 2
    GATHER = 3
    STEP = 4
    """The step's own work on the accelerator."""

    @property
    def words(self) -> str:
        """As the subject of a sentence."""
        return _WORDS[self]


_WORDS = {
    Limit.NOTHING: "nothing",
    Limit.WORKER: "the optimizer process",
    Limit.LINK: "the link to the host",
    Limit.GATHER: "the gather of the weights",
    Limit.STEP: "the step's own work on the accelerator",
}


@dataclass(frozen=True)
class MeasuredStep:
    """A typical overlapped step of one rank, in seconds.

    Attributes:
        device: from the end of one optimizer step to the start of the next.
        inside: duration of the optimizer step.
        wait: the part of `inside` in which the accelerator waited for the worker or for copies.
        worker: duration of the worker's pass, per step.
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
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.device + self.inside

    @property
    def busy(self) -> float:
        """Seconds without waits."""
        return self.total - self.wait

    @property
    def slowdown(self) -> float:
        """Its duration divided by that of a step without the optimizer."""
        return self.total / self.device

    @property
    def limit(self) -> Limit:
        """What takes the largest part of the optimizer step."""
        if self.slowdown < 1.0 + NOT_WORTH:
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
        return 0.0 if self.link else max(0.0, self.wait - max(0.0, self.worker - self.busy))


@dataclass(frozen=True)
class Remedy:
    """A change of the config that shortens a step.

    Attributes:
        change: a field with its value, as a config would give it.
        price: what it costs, as the end of a sentence.
        worker, link: factors on the durations of the pass and of the copies.
        room: bytes of accelerator memory that it takes.
    """

    change: str
    price: str
    worker: float = 1.0
    link: float = 1.0
    room: int = 0


@dataclass(frozen=True)
class Cores:
    """How many of a rank's cores the optimizer process has."""

    optimizer: int
    rank: int


@dataclass(frozen=True)
class Advice:
    """A judgement of a step.

    Attributes:
        slowdown: duration relative to a step without the optimizer.
        helped: slowdown with the remedy; None: nothing is suggested.
        line: all of it in one line.
    """

    slowdown: float
    limit: Limit
    helped: float | None
    line: str


def remedies_of(plan: ZenFlowPlan, *, is_settled: bool = False) -> tuple[Remedy, ...]:
    """What could be changed about a run with this plan; what keeps the numerics comes first.

    Args:
        is_settled: whether the share has been chosen by measurement.
    """
    return tuple(_remedies(plan, is_settled)) if plan.rule.overlapped else ()


def _remedies(plan: ZenFlowPlan, is_settled: bool) -> Iterator[Remedy]:
    rule = plan.rule
    if not isinstance(rule, PredictiveSettings):
        return
    chooses = plan.has_share or plan.measures_share or is_settled
    if not rule.layout.counts_updates:
        return
    if not chooses:
        yield from _shares(plan)
    if rule.layout.moment_dtype == "float32":
        layout = replace(rule.layout, moment_dtype="bfloat16")
        yield _with(plan, "state_dtype bfloat16", _BF16_PRICE, replace(rule, layout=layout))


def _shares(plan: ZenFlowPlan) -> Iterator[Remedy]:
    """Shares on the accelerator, the smallest first."""
    if plan.copies not in (Copies.INSIDE_STEP, Copies.BESIDE_STEP):
        return
    for host_share in SHARES:
        moved = with_host_share(plan, host_share, "")
        room = moved.held.share_bytes + moved.held.landing_bytes - plan.held.landing_bytes
        price = f"and takes {_size(room)} of the accelerator"
        yield Remedy('offload_optimizer.ratio "auto"', price, host_share, host_share, room=room)


def _with(plan: ZenFlowPlan, change: str, price: str, rule: PredictiveSettings) -> Remedy:
    now, then = traffic_of(plan), traffic_of(replace(plan, rule=rule))
    passed = [each.passed - each.down - each.up for each in (now, then)]
    link = max(then.down, then.up) / max(now.down, now.up)
    return Remedy(change, price, passed[1] / passed[0], link)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def advise(
    step: MeasuredStep,
    remedies: Sequence[Remedy] = (),
    cores: Cores | None = None,
    room: int = 0,
) -> Advice:
    """What limits `step`, and which remedy helps most.

    Args:
        cores: None: not known.
        room: bytes of accelerator memory that were never used.
    """
    limit, slowdown = step.limit, step.slowdown
    said = [
        f"ZenFlow: a step takes {slowdown:.2f}x its time without the optimizer; "
        f"{limit.words} limits it"
    ]
    if limit is Limit.WORKER and cores is not None:
        said[0] += f" ({cores.optimizer} of {cores.rank} cores)"
        if cores.rank - cores.optimizer > CORES_OF_PYTORCH:
            more = cores.rank - CORES_OF_PYTORCH
            said.append(f"pt_reserved_cores {CORES_OF_PYTORCH} would give it {more}")
    found = None
    if limit in (Limit.WORKER, Limit.LINK):
        found = _best([(_helped(step, each), each) for each in remedies if each.room <= room])
    if found is None or found[0] > slowdown - ENOUGH:
        return Advice(slowdown, limit, None, ". ".join(said) + ".")
    helped, remedy = found
    said.append(f"{remedy.change} would make it {helped:.2f}x, {remedy.price}")
    return Advice(slowdown, limit, helped, ". ".join(said) + ".")


def _best(found: Sequence[tuple[float, Remedy]]) -> tuple[float, Remedy] | None:
    """The first that is nearly as good as the best."""
    least = min((helped for helped, _ in found), default=0.0)
    return next((each for each in found if each[0] <= least + ENOUGH), None)


def _helped(step: MeasuredStep, remedy: Remedy) -> float:
    """The slowdown with `remedy`: what limits the step shrinks by its factor, and everything else
    stays."""
    exposed = remedy.link * step.exposed_copies
    worker, link = remedy.worker * step.worker, remedy.link * (step.link or step.exposed_copies)
    total = step.total - step.exposed_copies + exposed
    if step.limit is Limit.WORKER:
        total += worker - step.worker
    elif step.link:
        total += link - step.link
    return max(step.busy + exposed, total, worker, link) / step.device
