"""Answers whether a model fits a machine, how long a step takes, how to train it best, and what is
missing. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from deepspeed_ext.commands.memory.model import GIB, Machine, Model, Shape
from deepspeed_ext.commands.memory.plan import MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import Setup, inexactness, name_of, ways
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.times import (
    ChainTimes,
    Lanes,
    chosen_share,
    lanes_of,
    least_units,
    with_host_share,
)

__all__ = [
    "Fit",
    "GPU_RESERVE",
    "HOST_RESERVE",
    "Question",
    "RANK_RESERVE",
    "fits",
    "lanes_on",
    "nearest",
    "suggested",
]

GPU_RESERVE, HOST_RESERVE, RANK_RESERVE = 2 * GIB, 4 * GIB, 2 * GIB
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
        tokens: tokens per GPU and optimizer step.
        sequence: tokens of a GPU in the smallest micro-step; a step may be one micro-step, too.
        recomputed: activations are recomputed in backward.
        fused_loss: the loss makes no logits of all tokens at once (Liger's kernel).
    """

    shape: Shape
    model: Model
    machine: Machine
    tokens: int = 8192
    sequence: int = 4096
    recomputed: bool = True
    fused_loss: bool = False

    @property
    def micro_steps(self) -> int:
        """The most micro-steps of a step."""
        return -(-self.tokens // self.sequence)

    def activations(self, micro_steps: int) -> int:
        """Bytes of activations of a GPU in a step of so many micro-steps."""
        how = {"recomputed": self.recomputed, "fused_loss": self.fused_loss}
        at_once = max(self.sequence, -(-self.tokens // micro_steps))
        return self.shape.activation_bytes(at_once, self.model.itemsize, **how)

    @property
    def forward(self) -> float:
        """Seconds of a forward: two operations per parameter and token."""
        return 2 * self.shape.active * self.tokens / self.machine.flops

    @property
    def compute(self) -> float:
        """Seconds of forward and backward, which is two forwards, or three that recompute."""
        return (4 if self.recomputed else 3) * self.forward


def lanes_on(plan: MemoryPlan) -> Lanes:
    """How long the optimizer's chain takes on the plan's machine, and how much of it a step can
    hide.

    Weights on the host are fetched twice beside forward and backward. ZeRO-Offload converts
    gradients to fp32 before they go down, which alone it hides, during backward; Adam's pass, which
    reads p, m, v and the gradient and writes p, m, v, and the weights' way up follow.
    """
    setup, item, machine = plan.setup, plan.model.itemsize, plan.machine
    numel, link = setup.partition_numel(plan.model, machine), machine.link
    on_host = setup.weights is Place.HOST
    fetched = 2 * setup.accumulation * on_host * item * numel / link
    if plan.zenflow is not None:
        lanes = lanes_of(plan.zenflow, link, machine.host_of_rank)
        hides = plan.zenflow.rule.overlapped
        return replace(lanes, beside=max(lanes.beside, fetched)) if hides else lanes
    if not setup.offload:
        return Lanes(0.0, 0.0, 0.0, 0.0, fetched)
    copied = 4 + item if item < 4 else 0
    down, up = 4 * numel / link, item * numel / link
    passed = (7 * 4 + copied) * numel / machine.host_of_rank
    return Lanes(down, up, passed, passed + (0.0 if on_host else up), max(down, fetched))


@dataclass(frozen=True)
class Fit:
    """One way to train on one machine, and its memory."""

    question: Question
    plan: MemoryPlan

    @property
    def setup(self) -> Setup:
        """The settings of the run."""
        return self.plan.setup

    @property
    def name(self) -> str:
        """The way, with its stage."""
        return f"stage {self.setup.stage}, {name_of(self.setup, self.plan.zenflow)}"

    @cached_property
    def waits(self) -> float:
        """Seconds of a step in which it waits for the optimizer. Weights arrive in the forward of
        the first micro-step."""
        forward = self.question.forward / self.setup.accumulation
        return lanes_on(self.plan).waits(forward, self.question.compute - forward)

    @property
    def seconds(self) -> float:
        """Seconds of a whole step."""
        return self.question.compute + self.waits

    @cached_property
    def needed(self) -> dict[Place, int]:
        """Bytes of a GPU, with activations in forward and backward, and of a host with all its
        ranks."""
        there = Place.ACCELERATOR
        made = self.question.activations(self.setup.accumulation)
        gpu = max(self.plan.peak(there), self.plan.nbytes(there, Phase.BACKWARD) + made)
        return {there: gpu, Place.HOST: self.plan.host_peak()}

    @cached_property
    def _sizes(self) -> dict[Place, int]:
        machine = self.question.machine
        of_all = {Place.ACCELERATOR: machine.gpu_bytes, Place.HOST: machine.host_bytes}
        return {place: size for place, size in of_all.items() if size is not None}

    @property
    def left(self) -> dict[Place, int]:
        """By place, bytes left beside the reserve; empty: the machine is not known."""
        of_host = HOST_RESERVE + self.question.machine.per_host * RANK_RESERVE
        kept = {Place.ACCELERATOR: GPU_RESERVE, Place.HOST: of_host}
        return {at: size - kept[at] - self.needed[at] for at, size in self._sizes.items()}

    @property
    def short(self) -> list[Place]:
        """The places where memory is missing."""
        return [place for place, nbytes in self.left.items() if nbytes < 0]

    @property
    def missing(self) -> float:
        """Missing fraction of a GPU's memory plus that of a host's."""
        return sum(-self.left[place] / self._sizes[place] for place in self.short)

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but less than a fiftieth of what it needs is to spare."""
        left = self.left.items()
        return not self.short and any(size < self.needed[place] / 50 for place, size in left)


def fits(question: Question, setups: Iterable[Setup] | None = None) -> list[Fit]:
    """Rate all ways on this machine, each with a step in one micro-step and in as many as
    sequences, or only `setups`. If a run puts gradients on the host by itself, the way that asks
    for it stands for both."""
    counts = sorted({1, question.micro_steps})
    tried = (setup for count in counts for setup in ways(count)) if setups is None else setups
    return list({fit.name: fit for fit in (_fit(question, each) for each in tried)}.values())


def _fit(question: Question, setup: Setup) -> Fit:
    """If a run would choose its share of the optimizer on the GPU once it has measured its steps,
    with the share that the machine's speeds predict."""
    model, machine = question.model, question.machine
    fit = Fit(question, plan_memory(model, machine, setup))
    zenflow, total = fit.plan.zenflow, machine.gpu_bytes
    if zenflow is None or not zenflow.measures_share:
        return fit
    whole = Fit(question, plan_memory(model, machine, replace(fit.setup, host_share=1.0)))
    now, section = whole.plan.zenflow, setup.zenflow
    assert now is not None
    assert section is not None
    if total is not None:
        lanes = lanes_on(whole.plan)
        slower_way = max(lanes.down, lanes.up)
        times = ChainTimes(question.compute, lanes.host, slower_way, _CONTENTION)
        reserve = max(GPU_RESERVE, round(total * section.offload_reserve_fraction))
        room = total - reserve - whole.needed[Place.ACCELERATOR]
        share, _ = chosen_share(now, [(times, least_units(now, room))])
        now = with_host_share(now, share, "predicted from the machine's speeds")
    return Fit(question, replace(fit.plan, zenflow=now))


def suggested(found: Sequence[Fit]) -> Fit | None:
    """Of the ways that fit with the least rounded moments, the simplest of the fastest; None: no
    way fits, or the GPU's memory is not known."""
    fitting = [fit for fit in found if Place.ACCELERATOR in fit.left and not fit.short]
    least = min((inexactness(fit.setup) for fit in fitting), default=0)
    exact = [fit for fit in fitting if inexactness(fit.setup) == least]
    most = min((fit.seconds for fit in exact), default=0.0) / SAME_TIME
    return min((fit for fit in exact if fit.seconds <= most), key=_simplicity, default=None)


def _simplicity(fit: Fit) -> tuple[float, ...]:
    """Without offload, then with the exact rule, then with sums in fp32, then with weights on the
    GPU, then in one micro-step, then at the lower stage, then with less of the optimizer on the
    GPU."""
    setup, plan = fit.setup, fit.plan.zenflow
    is_predicted = setup.zenflow is not None and setup.zenflow.rule != "exact"
    offloads = setup.offload or setup.zenflow is not None
    moved = 0.0 if plan is None else 1.0 - plan.host_share
    costs = offloads, is_predicted, setup.sums == "bf16", setup.offload_param
    return *costs, setup.accumulation, setup.stage, moved, fit.seconds


def nearest(found: Sequence[Fit]) -> Fit:
    """The way that misses the least memory."""
    return min(found, key=lambda fit: (fit.missing, fit.seconds))
