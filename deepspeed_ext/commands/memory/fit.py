"""Answers whether a model fits a machine, how to train it best, and what is missing. Pure
functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.machine import Machine, lanes_on
from deepspeed_ext.commands.memory.model import Shape, typical
from deepspeed_ext.commands.memory.plan import Capacity, MemoryPlan, added_up, plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.commands.memory.ways import inexactness, name_of, ways
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.share import ChainTimes, chosen_share, least_units, with_host_share

__all__ = [
    "GPU_RESERVE",
    "HOST_RESERVE",
    "RANK_RESERVE",
    "Fit",
    "Question",
    "faster",
    "fits",
    "largest",
    "nearest",
    "suggested",
]

_GIB = 1 << 30
GPU_RESERVE, HOST_RESERVE, RANK_RESERVE = 2 * _GIB, 4 * _GIB, 2 * _GIB
"""Bytes that stay free: per GPU for its context, collectives and fragmentation; per host for the
system and its kernel; per rank for libraries (1.2 GiB on an H100, docs/results/gpu.md) and data."""
SAME_TIME = 0.85
"""Ways count as equally fast unless one takes less than this fraction of the other's time: times
are arithmetic, and most runs are slower (docs/design/time_model.md)."""
_CONTENTION = 0.2
"""Seconds by which a second of the host's pass delays forward and backward: on an H200, 336 ms of
pass, 73 % of it on the host, made 307 ms of 258 (gpu_h200_default.json)."""


@dataclass(frozen=True)
class Question:
    """What to train, and on which machine.

    Attributes:
        shape: the model's.
        model: its parameters.
        ranks: GPUs, and how many share a host.
        capacity: memory of a GPU and of a host, as far as it is known.
        tokens: tokens per GPU and optimizer step.
        sequence: tokens per GPU and micro-step, whose activations count.
        fused_loss: the loss makes no logits of all tokens at once (Liger's kernel).
    """

    shape: Shape
    model: Model
    ranks: Ranks
    capacity: Capacity
    machine: Machine
    tokens: int = 8192
    sequence: int = 4096
    fused_loss: bool = False

    @property
    def activations(self) -> int:
        """Bytes of activations of a GPU, recomputed or not as the machine's operations count."""
        return self.shape.activation_bytes(
            self.sequence,
            self.model.itemsize,
            recomputed=self.machine.per_token == Machine.per_token,
            fused_loss=self.fused_loss,
        )

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.machine.seconds(self.shape.active, self.tokens)


@dataclass(frozen=True)
class Fit:
    """One way to train on one machine.

    Attributes:
        plan: its memory.
        waits, seconds: what a step waits for the optimizer, and a whole step.
        needed: bytes of a GPU with activations, and of a host with all its ranks.
        left: by place, bytes left beside the reserve; empty: the machine is not known.
        missing: missing fraction of a GPU's memory plus that of a host's.
    """

    plan: MemoryPlan
    waits: float
    seconds: float
    needed: dict[Place, int]
    left: dict[Place, int]
    missing: float

    @property
    def setup(self) -> Setup:
        """The settings of the run."""
        return self.plan.setup

    @property
    def name(self) -> str:
        """The way, with its stage."""
        return f"stage {self.setup.stage}, {name_of(self.setup, self.plan.zenflow)}"

    @property
    def short(self) -> list[Place]:
        """The places where memory is missing."""
        return [place for place, nbytes in self.left.items() if nbytes < 0]

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but less than a fiftieth of what it needs is to spare."""
        left = self.left.items()
        return not self.short and any(size < self.needed[place] / 50 for place, size in left)


def fits(question: Question, setups: Iterable[Setup] | None = None) -> list[Fit]:
    """Rate all ways on this machine, or only `setups`. If a run puts gradients on the host by
    itself, the way that asks for it stands for both."""
    found = [_fit(question, setup) for setup in (ways() if setups is None else setups)]
    return list({fit.name: fit for fit in found}.values())


def _fit(question: Question, setup: Setup) -> Fit:
    model, ranks, capacity = question.model, question.ranks, question.capacity
    plan = plan_memory(model, ranks, setup, capacity)
    if plan.zenflow is not None and plan.zenflow.measures_share:
        plan = added_up(model, ranks, plan.setup, _as_measured(question, plan.setup))
    lanes = lanes_on(question.machine, model, ranks, plan.setup, plan.zenflow)
    forward = question.machine.forward * question.compute
    waits = lanes.waits(forward, question.compute - forward)
    needed = {Place.ACCELERATOR: _of_gpu(question, plan), Place.HOST: plan.host_peak()}
    kept = {Place.ACCELERATOR: GPU_RESERVE, Place.HOST: _kept_of_host(ranks)}
    of_all = {Place.ACCELERATOR: capacity.accelerator, Place.HOST: capacity.host}
    sizes = {place: size for place, size in of_all.items() if size is not None}
    left = {place: size - kept[place] - needed[place] for place, size in sizes.items()}
    missing = sum(-nbytes / sizes[place] for place, nbytes in left.items() if nbytes < 0)
    return Fit(plan, waits, question.compute + waits, needed, left, missing)


def _of_gpu(question: Question, plan: MemoryPlan) -> int:
    """Bytes of a GPU, with activations in forward and backward."""
    in_backward = plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD) + question.activations
    return max(plan.peak(Place.ACCELERATOR), in_backward)


def _kept_of_host(ranks: Ranks) -> int:
    return HOST_RESERVE + ranks.per_host * RANK_RESERVE


def _as_measured(question: Question, setup: Setup) -> ZenFlowPlan:
    """ZenFlow's plan with the share of the optimizer on the GPU that a run would choose once it has
    measured its steps, predicted from the assumed speeds."""
    setup = replace(setup, host_share=1.0)
    plan = plan_memory(question.model, question.ranks, setup, question.capacity)
    now, total = plan.zenflow, question.capacity.accelerator
    assert now is not None
    assert setup.zenflow is not None
    if total is None:
        return now
    lanes = lanes_on(question.machine, question.model, question.ranks, setup, now)
    times = ChainTimes(question.compute, lanes.host, max(lanes.down, lanes.up), _CONTENTION)
    reserve = max(GPU_RESERVE, round(total * setup.zenflow.offload_reserve_fraction))
    room = total - reserve - _of_gpu(question, plan)
    share, _ = chosen_share(now, [(times, least_units(now, room))])
    return with_host_share(now, share, "predicted from the machine's speeds")


def _fitting(found: Sequence[Fit]) -> list[Fit]:
    """The ways that fit, fp32 moments first; none if the GPU's memory is not known."""
    fitting = [fit for fit in found if Place.ACCELERATOR in fit.left and not fit.short]
    return sorted(fitting, key=lambda fit: inexactness(fit.setup))


def suggested(found: Sequence[Fit]) -> Fit | None:
    """Of the ways that fit with the least rounded moments, the simplest of the fastest; None: no
    way fits, or the machine is not known."""
    fitting = _fitting(found)
    exact = [fit for fit in fitting if inexactness(fit.setup) == inexactness(fitting[0].setup)]
    most = min((fit.seconds for fit in exact), default=0.0) / SAME_TIME
    return min((fit for fit in exact if fit.seconds <= most), key=_simplicity, default=None)


def _simplicity(fit: Fit) -> tuple[float, ...]:
    """Without offload, then with the exact rule, then with weights on the GPU, then at the lower
    stage, then with less of the optimizer on the GPU."""
    zenflow, plan = fit.setup.zenflow, fit.plan.zenflow
    is_predicted = zenflow is not None and zenflow.rule != "exact"
    moved = 0.0 if plan is None else 1.0 - plan.host_share
    offloaded = not fit.setup.on_accelerator, is_predicted, fit.setup.offload_param
    return (*offloaded, fit.setup.stage, moved, fit.seconds)


def faster(found: Sequence[Fit]) -> Fit | None:
    """A way that fits and is clearly faster than the suggested one: of these the least rounded one
    that is about as fast as the fastest."""
    fitting, best = _fitting(found), suggested(found)
    if best is None:
        return None
    most = min(min(fit.seconds for fit in fitting) / SAME_TIME, SAME_TIME * best.seconds)
    return suggested([fit for fit in fitting if fit.seconds <= most])


def nearest(found: Sequence[Fit]) -> Fit:
    """The way that misses the least memory."""
    return min(found, key=lambda fit: (fit.missing, fit.seconds))


def largest(question: Question, setups: Sequence[Setup]) -> tuple[int, Fit] | None:
    """The most parameters of a typical model that fit this machine in one of these ways, to two
    digits, and the way; None: not even a millionth of this model's."""

    def tried(params: int) -> Fit | None:
        shape = typical(params)
        model = Model(params, min(params, shape.largest), question.model.dtype)
        return suggested(fits(replace(question, shape=shape, model=model), setups))

    low, high = question.model.params // 10**6, question.model.params
    if low == 0 or tried(low) is None:
        return None
    while high - low > max(1, low // 200):
        middle = (low + high) // 2 if high < 4 * low else math.isqrt(low * high)
        low, high = (low, middle) if tried(middle) is None else (middle, high)
    digits = max(0, len(str(low)) - 2)
    rounded = low // 10**digits * 10**digits
    best = tried(rounded)
    return None if best is None else (rounded, best)
