"""``deepspeed-ext plan --memory``: whether a model fits a machine, how long a step takes, how to
train it best, and what is missing; as text, the answer first, or as JSON. Imports DeepSpeed only if
there is a config, and never torch."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed_ext.commands.memory.model import (
    GIB,
    Machine,
    Model,
    Shape,
    machine_of,
    read_shape,
    typical,
)
from deepspeed_ext.commands.memory.plan import MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import (
    Setup,
    config_of,
    cost_of,
    inexactness,
    name_of,
    read_config,
    sections_of,
    ways,
)
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place, Source
from deepspeed_ext.zenflow.plan.times import (
    ChainTimes,
    Lanes,
    chosen_share,
    lanes_of,
    least_units,
    traffic_of,
    with_host_share,
)

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
    """What to train, and on which machine: tokens per GPU and optimizer step, and in a sequence,
    the smallest micro-step; whether activations are recomputed in backward, and whether the loss
    makes no logits of all tokens at once (Liger's kernel)."""

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
    reads p, m, v and the gradient and writes p, m, v, and the weights' way up follow. Gradients
    that leave in backward are hidden with `overlap_comm` alone: otherwise their copies, and those
    of ours that bring a sum of micro-steps up again to add to it, run in backward's own stream.
    """
    setup, item, machine = plan.setup, plan.model.itemsize, plan.machine
    numel, link = setup.partition_numel(plan.model, machine), machine.link
    on_host, ours = setup.weights is Place.HOST, plan.zenflow
    fetched = 2 * setup.accumulation * on_host * item * numel / link
    if ours is not None:
        lanes = lanes_of(ours, link, machine.host_of_rank)
        waits = ours.source is Source.BACKWARD and not setup.overlaps
        copied = waits * (2 * setup.accumulation - 1) * traffic_of(ours).down * numel / link
        beside = max(lanes.beside, ours.rule.overlapped * fetched)
        return replace(lanes, exposed=lanes.exposed + copied, beside=beside)
    numel *= setup.offload  # otherwise nothing moves
    down, up = 4 * numel / link, item * numel / link
    passed = (7 * 4 + (4 + item if item < 4 else 0)) * numel / machine.host_of_rank
    exposed = passed + (not on_host) * up + (not setup.overlaps) * down
    return Lanes(down, up, passed, exposed, max(setup.overlaps * down, fetched))


@dataclass(frozen=True)
class Fit:
    """One way to train on one machine, and its memory."""

    question: Question
    plan: MemoryPlan

    @property
    def setup(self) -> Setup:
        return self.plan.setup

    @property
    def name(self) -> str:
        """The way, with its stage."""
        return f"stage {self.setup.stage}, {name_of(self.setup, self.plan.zenflow)}"

    @cached_property
    def waits(self) -> float:
        """Seconds of a step in which it waits for the optimizer. Weights arrive in the forward of
        the first micro-step, whose backward needs the slots if gradients leave in it."""
        ours, whole, micro_steps = self.plan.zenflow, self.question.compute, self.setup.accumulation
        forward = self.question.forward / micro_steps
        if ours is not None and ours.peeks and ours.source is Source.BACKWARD:
            whole /= micro_steps
        return lanes_on(self.plan).waits(forward, whole - forward)

    @property
    def seconds(self) -> float:
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
        sizes = self.question.machine.gpu_bytes, self.question.machine.host_bytes
        return {place: size for place, size in zip(Place, sizes, strict=True) if size is not None}

    @property
    def left(self) -> dict[Place, int]:
        """By place, bytes left beside the reserve; empty: the machine is not known."""
        of_host = HOST_RESERVE + self.question.machine.per_host * RANK_RESERVE
        kept = {Place.ACCELERATOR: GPU_RESERVE, Place.HOST: of_host}
        return {at: size - kept[at] - self.needed[at] for at, size in self._sizes.items()}

    @property
    def short(self) -> list[Place]:
        return [place for place, nbytes in self.left.items() if nbytes < 0]

    @property
    def missing(self) -> float:
        """Missing fraction of a GPU's memory plus that of a host's."""
        return sum(-self.left[place] / self._sizes[place] for place in self.short)


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
    fit = Fit(question, plan_memory(question.model, question.machine, setup))
    now, section, total = fit.plan.zenflow, setup.zenflow, question.machine.gpu_bytes
    if now is None or section is None or total is None or not now.measures_share:
        return fit
    lanes = lanes_on(fit.plan)  # until it has measured, the host steps all of it
    times = ChainTimes(question.compute, lanes.host, max(lanes.down, lanes.up), _CONTENTION)
    reserve = max(GPU_RESERVE, round(total * section.offload_reserve_fraction))
    room = total - reserve - fit.needed[Place.ACCELERATOR]
    share, why = chosen_share(now, [(times, least_units(now, room))])
    return Fit(question, replace(fit.plan, zenflow=with_host_share(now, share, why)))


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


# -- the command ----------------------------------------------------------------------------------

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_TYPICAL = "activations and the largest parameter are those of a model like Llama 3"
_NAMES = {Place.ACCELERATOR: "GPU", Place.HOST: "host"}
_COLUMNS = ("GPU GiB", "host GiB", "step s", "waits s")


def run_from_cli(arguments: Any) -> str:
    """The report for the parsed arguments; writes the suggested config if ``--write`` asks for it.

    Raises:
        ConfigError: arguments or config contradict each other.
    """
    shape, notes = typical(arguments.params or 1), [f"{_TYPICAL}; --model has yours"]
    if arguments.model is not None:
        if arguments.params is not None:
            raise ConfigError("--params and --model: give only one")
        shape, notes = read_shape(arguments.model)
    setups, dtype = None, "bfloat16"
    if arguments.config is not None:
        if arguments.write is not None:
            raise ConfigError("--write: not with --config, which names one run")
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's logger would write into it
            setup, dtype, more = read_config(arguments.config, arguments.ranks)
        setups, notes = [setup], [*notes, *more]
    dtype = DTYPES.get(arguments.dtype, dtype)
    params = arguments.params or shape.params
    question = _question(arguments, shape, Model(params, min(params, shape.largest), dtype))
    found = fits(question, setups)
    written = ""
    if arguments.write is not None:
        if (best := suggested(found)) is None:
            raise ConfigError("--write: no run fits, or --gpu-gb is missing, so there is none")
        config = config_of(best.setup, dtype, vars(arguments)["for"] or "script")
        Path(arguments.write).write_text(f"{json.dumps(config, indent=2)}\n")
        written = f"\nIts config is in {arguments.write}."
    if arguments.json:
        return json.dumps(as_json(found, notes))
    text = as_text(found, notes, all_ways=bool(arguments.all))
    return f"{text}\n\n{phases_text(found[0])}" if setups is not None else f"{text}{written}"


def _question(arguments: Any, shape: Any, model: Model) -> Question:
    sizes = arguments.accelerator_gib, arguments.host_gib
    per_host = arguments.ranks_per_host or arguments.ranks
    if per_host > arguments.ranks:
        raise ConfigError("--ranks-per-host is more than --ranks")
    machine = machine_of(
        arguments.ranks,
        per_host,
        arguments.card,
        arguments.host,
        *(None if gib is None else int(gib * GIB) for gib in sizes),
        **{name: vars(arguments)[name] for name in ("link_gbps", "host_gbps", "tflops")},
    )
    sequence = arguments.seq_len or Question.sequence
    return Question(
        shape,
        model,
        machine,
        arguments.tokens or max(Question.tokens, sequence),
        sequence,
        recomputed=not arguments.keep_activations,
        fused_loss=bool(arguments.fused_loss),
    )


def as_text(found: Sequence[Fit], notes: Sequence[str], *, all_ways: bool) -> str:
    """The report on every way to answer one question, or the one that a config names, with a line
    for each way or for the best of each kind."""
    question = found[0].question
    model, machine = question.model, question.machine
    shown = list(found) if all_ways or len(found) == 1 else best_of_kinds(found)
    width = max(len(fit.name) for fit in shown) - len("stage ")
    recomputed = "recomputed" if question.recomputed else "kept"
    loss = "a fused loss (use_liger_kernel)" if question.fused_loss else "all logits at once"
    kept = [size // GIB for size in (GPU_RESERVE, HOST_RESERVE, RANK_RESERVE)]
    lines = [
        *answer(found),
        "",
        f"{question.shape.name}: {model.params:,} parameters in {model.dtype}, vocabulary of "
        f"{question.shape.vocabulary:,}; {counted(machine.ranks, 'GPU')}, {machine.per_host} per "
        "host.",
        f"Assumed: {machine.name}: {machine.flops / 1e12:g} TFLOP/s, {machine.link / 1e9:g} GB/s "
        f"each way, {machine.host_of_rank / 1e9:.0f} GB/s of host memory per GPU.",
        f"Activations: {_gib(question.activations(question.micro_steps))} GiB of "
        f"{question.sequence:,} tokens, {recomputed}, {loss}.",
        "Kept free: {} GiB of a GPU, {} GiB of a host and {} for each of its ranks.".format(*kept),
        *(f"note: {note}" for note in notes),
        "",
        f"{'stage, run':<{width}}{''.join(f'{column:>12}' for column in _COLUMNS)}   fits",
        *(_line(fit, width) for fit in shown),
        "",
        f"GPU: with activations. Step: {question.tokens:,} tokens per GPU. Waits: for the "
        "optimizer, in every step. Times are arithmetic.",
    ]
    if len(shown) < len(found):
        lines.append(f"Each line is the best of its kind; --all shows all {len(found)} ways.")
    return "\n".join(lines)


def best_of_kinds(found: Sequence[Fit]) -> list[Fit]:
    """The best way of each kind: one that fits, or else the one that misses the least memory."""
    kinds: dict[tuple[str, int], list[Fit]] = {}
    for fit in found:
        kind, *_ = name_of(fit.setup).split(",")
        kinds.setdefault((kind, inexactness(fit.setup)), []).append(fit)
    return [suggested(same) or nearest(same) for same in kinds.values()]


def answer(found: Sequence[Fit]) -> list[str]:
    """Whether the model fits, and how; what to write, and what it costs."""
    question = found[0].question
    if question.machine.gpu_bytes is None:
        return ["Does it fit? Add --card (or --gpu-gb) and --host-gb, as vendors write them."]
    best = suggested(found)
    if best is None:
        return _miss(found)
    left = " and ".join(f"{_gib(size)} GiB of the {_NAMES[at]}" for at, size in best.left.items())
    lines = [
        f"It fits: {best.name}, {best.seconds:,.2f} s a step. "
        f"Left: {left} beside what is kept free."
    ]
    if question.machine.host_bytes is None:
        lines.append("The host's memory is not known: add --host-gb.")
    if len(found) > 1:
        lines.append(f"Write {json.dumps(sections_of(best.setup))[1:-1]}")
    if (cost := cost_of(best.setup)) is not None:
        lines.append(f"Not AdamW to the bit: cost in loss {cost}.")
    return lines


def _miss(found: Sequence[Fit]) -> list[str]:
    question, near, setups = found[0].question, nearest(found), [fit.setup for fit in found]
    total = question.machine.gpu_bytes or 0
    lines = [f"It does not fit. Nearest: {near.name}, {_missing(near)}."]
    fused = suggested(fits(replace(question, fused_loss=True), setups))
    if fused is not None:
        lines.append(
            "With a fused loss (use_liger_kernel of the Trainer; --fused-loss here) it fits: "
            f"{fused.name}."
        )
    room = total - question.activations(question.micro_steps) - GPU_RESERVE
    each = {"LoRA": question.model.itemsize, "QLoRA": 0.5, "8-bit Adam without offload": 6}
    needs = {name: round(nbytes * question.model.params) for name, nbytes in each.items()}
    said = [
        f"{name} {_gib(nbytes)} GiB ({'fits' if nbytes <= room else 'does not fit'})"
        for name, nbytes in needs.items()
    ]
    return [*lines, f"Instead, on one GPU beside activations: {', '.join(said)}."]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}"


def _line(fit: Fit, width: int) -> str:
    waits = f"{fit.waits:,.2f}" if fit.waits else "-"
    cells = [*map(_gib, fit.needed.values()), f"{fit.seconds:,.2f}", waits]
    verdict = f"no: {_missing(fit)}" if fit.short else "yes" if fit.left else ""
    name = fit.name.removeprefix("stage ")
    return f"{name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}   {verdict}".rstrip()


def _missing(fit: Fit) -> str:
    """What is missing, rounded up, so that it is never 0."""
    tenths = {place: -(10 * fit.left[place] // GIB) for place in fit.short}
    short = (f"{_NAMES[place]} {tenth / 10:,.1f}" for place, tenth in tenths.items())
    return f"{', '.join(short)} GiB short"


def phases_text(fit: Fit) -> str:
    """One run by kind and phase, per rank."""
    lines = [f"{'GiB per rank':<36}{''.join(f'  {phase.value:>20}' for phase in Phase)}"]
    for place, name in _NAMES.items():
        rows: dict[str, list[int]] = {}
        for column, phase in enumerate(Phase):
            for part in fit.plan.parts[place, phase]:
                rows.setdefault(f"{name}: {part.kind}", [0] * len(Phase))[column] += part.nbytes
        rows[f"{name} in all"] = [fit.plan.nbytes(place, phase) for phase in Phase]
        if place is Place.HOST:
            rows["of it page-locked"] = [fit.plan.page_locked(phase) for phase in Phase]
        for title, sizes in rows.items():
            lines.append(f"{title:<36}{''.join(f'  {size / GIB:>20,.2f}' for size in sizes)}")
    return "\n".join(lines)


def as_json(found: Sequence[Fit], notes: Sequence[str]) -> dict[str, Any]:
    """The answer, and all ways: bytes, seconds and the config to copy."""
    best = suggested(found)
    return {
        "answer": answer(found),
        "suggested": None if best is None else found.index(best),
        "notes": list(notes),
        "ways": [
            {
                "stage": fit.setup.stage,
                "run": name_of(fit.setup, fit.plan.zenflow),
                "fits": None if not fit.left else not fit.short,
                "needed_bytes": {_NAMES[place]: size for place, size in fit.needed.items()},
                "step_seconds": fit.seconds,
                "waits_seconds": fit.waits,
                "config": config_of(fit.setup, fit.plan.model.dtype),
            }
            for fit in found
        ],
    }
