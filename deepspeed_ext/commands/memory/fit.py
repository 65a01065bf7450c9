"""Answers whether a model fits a machine, how to train it best, and what is missing. Pure
functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.activations import typical_activations
from deepspeed_ext.commands.memory.plan import Capacity, MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, typical_largest
from deepspeed_ext.commands.memory.traffic import Machine, StepTime, step_time
from deepspeed_ext.commands.memory.ways import inexactness, kind_of, name_of, ways
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Place

__all__ = [
    "GPU_RESERVE",
    "HOST_RESERVE",
    "RANK_RESERVE",
    "SAME_TIME",
    "Fit",
    "Question",
    "best_of_kinds",
    "faster",
    "fits",
    "largest",
    "nearest",
    "suggested",
]

_GIB = 1 << 30
GPU_RESERVE, HOST_RESERVE, RANK_RESERVE = 2 * _GIB, 8 * _GIB, _GIB // 2
"""Bytes that stay free: per GPU for its context, collectives and fragmentation; per host; and per
rank of a host."""
_MOST_TIMES_SMALLER = 10**6
SAME_TIME = 0.85
"""Ways count as equally fast unless one takes less than this fraction of the other's time: times
are arithmetic, and most runs are slower (docs/design/time_model.md)."""


@dataclass(frozen=True)
class Question:
    """What to train, and on which machine.

    Attributes:
        ranks: GPUs, and how many share a host.
        capacity: memory of a GPU and of a host, as far as it is known.
        active: parameters that a token uses.
        tokens: tokens per GPU and optimizer step, for the step times.
    """

    model: Model
    ranks: Ranks
    capacity: Capacity
    machine: Machine
    active: int
    tokens: int = 8192


@dataclass(frozen=True)
class Fit:
    """One way to train on one machine.

    Attributes:
        plan: its memory.
        time: its optimizer step.
        step_seconds: an optimizer step with forward and backward.
        tokens: tokens per GPU and step above which the optimizer adds no time; None: it always
            does.
        room: bytes of a GPU that are left for activations; None: its memory is not known.
        left: by place, bytes left at the peak beside activations and the reserve; empty: the
            machine is not known.
        missing: missing fraction of a GPU's memory plus that of a host's.
    """

    plan: MemoryPlan
    time: StepTime
    step_seconds: float
    tokens: int | None
    room: int | None
    left: dict[Place, int]
    missing: float

    @property
    def setup(self) -> Setup:
        """The settings of the run."""
        return self.plan.setup

    @property
    def name(self) -> str:
        """The way, with its stage."""
        return f"stage {self.setup.stage}, {name_of(self.setup, self.plan.copies)}"

    @property
    def short(self) -> list[Place]:
        """The places where memory is missing."""
        return [place for place, nbytes in self.left.items() if nbytes < 0]


def fits(question: Question, setups: Iterable[Setup] | None = None) -> list[Fit]:
    """Rate all ways on this machine, or only `setups`."""
    return [_fit(question, setup) for setup in (ways() if setups is None else setups)]


def _fit(question: Question, setup: Setup) -> Fit:
    model = question.model
    ranks = question.ranks
    capacity = question.capacity
    machine = question.machine
    plan = plan_memory(model, ranks, setup, capacity)
    time = step_time(model, ranks, plan.setup, machine)
    compute = machine.seconds(question.active, question.tokens)
    tokens = None if time.exposed else time.tokens(question.active, machine)
    left, room = dict[Place, int](), None
    if capacity.accelerator is not None:
        usable = capacity.accelerator - GPU_RESERVE
        room = usable - plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD)
        at_peak = usable - plan.peak(Place.ACCELERATOR)
        left[Place.ACCELERATOR] = min(at_peak, room - typical_activations(question.active))
    if capacity.host is not None:
        reserve = HOST_RESERVE + ranks.per_host * RANK_RESERVE
        left[Place.HOST] = capacity.host - reserve - plan.host_peak()
    of_all = {Place.ACCELERATOR: capacity.accelerator, Place.HOST: capacity.host}
    missing = sum(-nbytes / (of_all[place] or 1) for place, nbytes in left.items() if nbytes < 0)
    return Fit(plan, time, time.seconds(compute), tokens, room, left, missing)


def _best(found: Sequence[Fit]) -> Fit:
    """Among ways with the same numerics, the simplest of the fastest: without offload, then at the
    lower stage, then with the whole optimizer on the host."""
    most = min(fit.step_seconds for fit in found) / SAME_TIME
    return min((fit for fit in found if fit.step_seconds <= most), key=_simplicity)


def _simplicity(fit: Fit) -> tuple[float, ...]:
    return (not fit.setup.on_accelerator, fit.setup.stage, -fit.setup.host_share, fit.step_seconds)


def _fitting(found: Sequence[Fit]) -> list[Fit]:
    """The ways that fit, the most exact first; none if the GPU's memory is not known."""
    fitting = [fit for fit in found if Place.ACCELERATOR in fit.left and not fit.short]
    return sorted(fitting, key=lambda fit: inexactness(fit.setup))


def suggested(found: Sequence[Fit]) -> Fit | None:
    """The best of the most exact ways that fit; None: no way fits, or the machine is not known."""
    fitting = _fitting(found)
    if not fitting:
        return None
    least = inexactness(fitting[0].setup)
    return _best([fit for fit in fitting if inexactness(fit.setup) == least])


def faster(found: Sequence[Fit]) -> Fit | None:
    """The fastest way that fits and is less exact than the suggested one, if it is clearly
    faster."""
    best = suggested(found)
    if best is None:
        return None
    fastest = min(_fitting(found), key=lambda fit: fit.step_seconds)
    return fastest if fastest.step_seconds < SAME_TIME * best.step_seconds else None


def nearest(found: Sequence[Fit]) -> Fit:
    """The way that misses the least memory."""
    return min(found, key=lambda fit: (fit.missing, fit.step_seconds))


def best_of_kinds(found: Sequence[Fit]) -> list[Fit]:
    """The best way of each kind: one that fits, or else the one that misses the least memory."""
    kinds: dict[str, list[Fit]] = {}
    for fit in found:
        kinds.setdefault(kind_of(fit.setup), []).append(fit)
    return [
        suggested(same) or (nearest(same) if same[0].left else _best(same))
        for same in kinds.values()
    ]


def largest(question: Question, found: Sequence[Fit]) -> tuple[int, Fit] | None:
    """The most parameters of a typical model that fit this machine, to two digits, and the way;
    None: not even a millionth of this model's. Tries only ways that no other one beats at both
    places."""
    setups = [fit.setup for fit in found if not any(_beats(other, fit) for other in found)]

    def tried(params: int) -> Fit | None:
        model = Model(params, typical_largest(params), question.model.dtype)
        active = max(1, round(question.active * params / question.model.params))
        asked = replace(question, model=model, active=active)
        return suggested(fits(asked, (replace(setup, flatten_tier=None) for setup in setups)))

    low, high = question.model.params // _MOST_TIMES_SMALLER, question.model.params
    if low == 0 or tried(low) is None:
        return None
    while high - low > max(1, low // 200):
        middle = (low + high) // 2 if high < 4 * low else math.isqrt(low * high)
        low, high = (low, middle) if tried(middle) is None else (middle, high)
    digits = len(str(low)) - 2
    rounded = low // 10**digits * 10**digits if digits > 0 else low
    best = tried(rounded)
    return None if best is None else (rounded, best)


def _beats(one: Fit, other: Fit) -> bool:
    """Whether `one` leaves more than `other` at each place."""
    return all(one.left[place] > nbytes for place, nbytes in other.left.items())
