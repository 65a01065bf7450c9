"""Writes docs/fits.md from the plan of memory: the largest model of each way to offload, and what a
step hides.

    python -m tools.fits

Nothing is measured. Bytes and seconds come from `deepspeed_ext.commands.memory`, as `deepspeed-ext
plan --memory` prints them; here are only the machines, the shapes of the models, and what is left
free.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_ext.commands.memory import activations
from deepspeed_ext.commands.memory.activations import HEAD, VOCABULARY
from deepspeed_ext.commands.memory.fit import GPU_RESERVE, HOST_RESERVE, RANK_RESERVE
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage
from deepspeed_ext.commands.memory.traffic import Machine, StepTime, step_time
from deepspeed_ext.commands.memory.ways import name_of, ways
from deepspeed_ext.config import FlattenTier
from deepspeed_ext.flatten.plan import TIERS
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Place
from tools import deepspeed_zenflow as upstream

__all__ = ["PAGE", "Shape", "activation_bytes", "largest", "markdown"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fits.md"

GIB = 1 << 30
STAGES: tuple[Stage, ...] = (2, 3)
GPU_GIB = (24, 40, 80, 141)
GPUS = (1, 2, 4, 8)
HOST_GIB = (64, 128, 256, 512, 1024, 2048)

SIZES = (1, 3, 7, 13, 32, 70)
"""Billions of parameters in the tables of time."""
_HOST_SHARE, _GPU_SHARE = 0.8, 0.5
"""Of a peak, what a bandwidth test of many threads reaches, and what training does."""
_MACHINES = {
    "8 x A100": Machine(25e9, 409.6e9 * _HOST_SHARE, 312e12 * _GPU_SHARE),
    "8 x H200": Machine(52e9, 614.4e9 * _HOST_SHARE, 989e12 * _GPU_SHARE),
    "1 x GH200": Machine(300e9, 500e9 * _HOST_SHARE, 989e12 * _GPU_SHARE),
}
"""Bytes per second of the link and of a host, FLOP per second of a GPU."""


@dataclass(frozen=True)
class Link:
    """A kind of machine by its link.

    Attributes:
        machine: its speeds; the link's is that from the GPU to the host.
        up: bytes per second from the host to the GPU.
        per_host: GPUs of a host.
        says: what such a machine is.
    """

    machine: Machine
    up: float
    per_host: int
    says: str

    def time(self, model: Model, ranks: Ranks, setup: Setup) -> StepTime:
        """An optimizer step: what it exposes are weights that go up, what it hides gradients that
        go down."""
        down = step_time(model, ranks, setup, self.machine)
        up = step_time(model, ranks, setup, replace(self.machine, link=self.up))
        return replace(down, exposed=up.exposed)


def _symmetric(name: str, per_host: int, says: str) -> Link:
    machine = _MACHINES[name]
    return Link(machine, machine.link, per_host, says)


LINKS = {
    "PCIe 4": _symmetric("8 x A100", 8, "8 x A100, two sockets with 8 channels of DDR4-3200 each"),
    "PCIe 5": _symmetric(
        "8 x H200", 8, "8 x H100 or H200, two sockets with 8 channels of DDR5-4800 each"
    ),
    "NVLink-C2C": Link(
        replace(_MACHINES["1 x GH200"], link=170e9), 416e9, 1, "GH200, each GPU with its own host"
    ),
}
"""By link."""

ZERO_OFFLOAD, ZENFLOW, OURS = "ZeRO-Offload", "DeepSpeed-ZenFlow", "ZenFlow exact"
IN_STEP, EARLY = "ZenFlow exact, copies in the step", "ZenFlow exact, gradients on host"
"""What a run of ours does by itself where there is no room for copies beside the step, or for
gradients."""
ROUNDED, CODED = ", bf16 moments", ", 8-bit moments"
MOMENTS = (ROUNDED, CODED)
"""Behind the name of a way of ours: the same with such moments, which are not exact."""
SMALL = ("ZeRO-Offload, weights on host", "ZenFlow exact, weights on host")
"""Ways that take less of a GPU, at stage 3."""

FLASH_BYTES = 7
"""Of FlashOptim's AdamW on the GPU: bf16 weights, 8 bits of correction, two moments of 8 bits, and
the gradient."""


@dataclass(frozen=True)
class Owned:
    """A machine that people own.

    Attributes:
        host_gib: memory of the host, for each size that is common.
    """

    name: str
    gpus: int
    gpu_gib: int
    host_gib: tuple[int, ...]


OWNED = (
    Owned("RTX 4090", 1, 24, (64, 96, 128, 192)),
    Owned("RTX 5090", 1, 32, (64, 96, 128, 192)),
    Owned("2 x RTX 3090", 2, 24, (64, 128, 192)),
    Owned("GH200", 1, 96, (480,)),
    Owned("8 x H100", 8, 80, (1024, 2048)),
)


@dataclass(frozen=True)
class Shape:
    """A dense decoder as Llama's: heads of 128, as many layers as heads, 12 d^2 parameters in each,
    and an embedding and an output matrix of 32,768 rows.

    Attributes:
        width: d.
    """

    width: int

    @property
    def layers(self) -> int:
        return round(self.width / HEAD)

    @property
    def params(self) -> int:
        return 12 * self.layers * self.width**2 + 2 * VOCABULARY * self.width

    @property
    def model(self) -> Model:
        return Model(self.params, max(VOCABULARY * self.width, 8 * self.width**2 // 3), "bfloat16")


SHAPES = tuple(Shape(width) for width in range(512, 24577, 64))
"""From 0.08 to 900 billion parameters."""


def activation_bytes(shape: Shape) -> int:
    """Bytes of activations of one sequence."""
    return activations.activation_bytes(shape.layers, shape.width)


def _moments(name: str) -> str:
    """The end of `name` that says how moments are kept; "" if they are exact."""
    return next((end for end in MOMENTS if name.endswith(end)), "")


def setup_of(name: str, stage: Stage) -> Setup:
    """The run of that name."""
    if name == ZENFLOW:
        return upstream.setup(stage)
    if end := _moments(name):
        name = name.removesuffix(end).replace(" exact", end.removeprefix(","))
    return next(setup for setup in ways() if name_of(setup) == name and setup.stage == stage)


@functools.cache
def needed(
    name: str, stage: Stage, gpus: int, tier: FlattenTier | None, shape: Shape
) -> tuple[int, int]:
    """Bytes of a GPU, with activations in forward and backward, and bytes of a host with all GPUs;
    both with what stays free."""
    ranks, setup = Ranks(gpus, gpus), replace(setup_of(name, stage), flatten_tier=tier)
    plan = plan_memory(shape.model, ranks, setup)
    backward = plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD) + activation_bytes(shape)
    device, host = max(plan.peak(Place.ACCELERATOR), backward), plan.host_peak()
    if name == ZENFLOW:
        device += upstream.device_extra(shape.model, ranks, stage)
        host += gpus * upstream.host_extra(shape.model, ranks, stage)
    return device + GPU_RESERVE, host + HOST_RESERVE + gpus * RANK_RESERVE


@functools.cache
def largest(name: str, stage: Stage, gpus: int, gpu_gib: int, host_gib: int) -> Shape | None:
    """The largest model that fits one host with `gpus` GPUs; None: not even the smallest shape.
    Flattening takes the tier with which most fits."""

    def fitting(tier: FlattenTier | None) -> int:
        def gpu(shape: Shape) -> bool:
            return needed(name, stage, gpus, tier, shape)[0] <= gpu_gib * GIB

        def host(shape: Shape) -> bool:
            return needed(name, stage, gpus, tier, shape)[1] <= host_gib * GIB

        return min(_first_not(gpu), _first_not(host))

    count = max(fitting(tier) for tier in (TIERS if stage < 3 else (None,)))
    return SHAPES[count - 1] if count else None


def _best(name: str, stage: Stage, gpus: int, gpu_gib: int, host_gib: int) -> Shape | None:
    """`largest`, of ours with copies beside or in the step or gradients on the host, whichever is
    larger."""
    end = _moments(name)
    same = [each + end for each in (OURS, IN_STEP, EARLY)] if name == OURS + end else [name]
    return _largest_of(largest(each, stage, gpus, gpu_gib, host_gib) for each in same)


@functools.cache
def flash_largest(stage: Stage, gpus: int, gpu_gib: int) -> Shape | None:
    """The largest model that FlashOptim's AdamW trains, on GPUs alone: each holds everything (stage
    2, DDP), or its share and two layers that are gathered (stage 3, FSDP2)."""

    def fits(shape: Shape) -> bool:
        held = FLASH_BYTES * shape.params
        if stage == 3 and gpus > 1:
            held = held // gpus + 2 * 2 * 12 * shape.width**2
        return held + activation_bytes(shape) + GPU_RESERVE <= gpu_gib * GIB

    count = _first_not(fits)
    return SHAPES[count - 1] if count else None


def _first_not(fits: Callable[[Shape], bool]) -> int:
    """How many of `SHAPES`, from the smallest on, fit; needs grow with the shape."""
    low, high = 0, len(SHAPES)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(SHAPES[middle]) else (low, middle)
    return low


def _billions(shape: Shape | None) -> str:
    if shape is None:
        return "-"
    billions = shape.params / 1e9
    return f"{billions:.1f}" if billions < 10 else f"{billions:.0f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _memory_table(gpu_gib: int) -> str:
    rows = []
    for stage in STAGES:
        for gpus in GPUS:
            cells = [_cell(stage, gpus, gpu_gib, host) for host in HOST_GIB]
            flash = _billions(flash_largest(stage, gpus, gpu_gib))
            rows.append([str(stage), str(gpus), *cells, flash])
    return _table(["stage", "GPUs", *(f"{host:,} GB" for host in HOST_GIB), "FlashOptim"], rows)


def _owned_table() -> str:
    """For each machine the largest model of each way at its best stage, then with weights on the
    host."""
    names = (ZERO_OFFLOAD, ZENFLOW, OURS, OURS + ROUNDED, OURS + CODED)
    rows = []
    for machine in OWNED:
        for host in machine.host_gib:
            size = (machine.gpus, machine.gpu_gib, host)
            found = [_largest_of(_best(name, stage, *size) for stage in STAGES) for name in names]
            found += [largest(name, 3, *size) for name in SMALL]
            found.append(_largest_of(flash_largest(stage, *size[:2]) for stage in STAGES))
            rows.append([machine.name, f"{host:,} GB", *map(_billions, found)])
    ways = ("ZeRO-Offload", ZENFLOW, "ours", "bf16 moments", "8-bit moments")
    on_host = ("ZeRO-Offload, weights on host", "ours, weights on host")
    return _table(["machine", "host", *ways, *on_host, "FlashOptim"], rows)


def _largest_of(shapes: Iterable[Shape | None]) -> Shape | None:
    return max((shape for shape in shapes if shape), key=lambda shape: shape.params, default=None)


def _cell(stage: Stage, gpus: int, gpu_gib: int, host_gib: int) -> str:
    """Five numbers; ours, exact, is bold where it is the largest of the first three."""
    names = (ZERO_OFFLOAD, ZENFLOW, OURS, OURS + ROUNDED, OURS + CODED)
    found = [_best(name, stage, gpus, gpu_gib, host_gib) for name in names]
    texts = [_billions(shape) for shape in found]
    sizes = [shape.params if shape else 0 for shape in found]
    if sizes[2] > max(sizes[:2]):
        texts[2] = f"**{texts[2]}**"
    return " / ".join(texts)


def _small_table() -> str:
    rows = []
    for gpu_gib in GPU_GIB:
        for gpus in (1, 8):
            cells = [[largest(name, 3, gpus, gpu_gib, host) for name in SMALL] for host in HOST_GIB]
            rows.append(
                [f"{gpu_gib} GB", str(gpus), *(" / ".join(map(_billions, cell)) for cell in cells)]
            )
    return _table(["GPU", "GPUs", *(f"{host:,} GB" for host in HOST_GIB)], rows)


def _bytes_table() -> str:
    """Bytes per parameter, with the phase that has the most."""
    model, ranks = Model(7 * 10**9, 10**8, "bfloat16"), Ranks(8, 8)
    rows = []
    for stage in STAGES:
        for name in (ZERO_OFFLOAD, ZENFLOW, OURS, EARLY, OURS + ROUNDED, OURS + CODED):
            plan = plan_memory(model, ranks, replace(setup_of(name, stage), flatten_tier=TIERS[-1]))
            extra = ranks.count * upstream.host_extra(model, ranks, stage) if name == ZENFLOW else 0
            device = upstream.device_extra(model, ranks, stage) if name == ZENFLOW else 0
            phases = [phase for phase in Phase if phase.is_in_every_run]
            most = max(phases, key=plan.on_host)
            there = max((plan.nbytes(Place.ACCELERATOR, phase), phase.value) for phase in phases)[1]
            numbers = (
                plan.on_host(Phase.BETWEEN) + extra,
                plan.host_peak() + extra,
                plan.peak(Place.ACCELERATOR) + device,
            )
            held, peak, gpu = (f"{nbytes / model.params:.1f}" for nbytes in numbers)
            shown = name.replace(" exact,", ",") if _moments(name) else name
            rows.append([str(stage), shown, held, f"{peak} ({most.value})", f"{gpu} ({there})"])
    head = ["stage", "way", "host, between steps", "host, at its peak", "GPU, at its peak"]
    return _table(head, rows)


def _ratios(rival: str, own: str = OURS) -> list[float]:
    """The size of our largest model over that of a rival's, for every machine on which both have
    one."""
    found = []
    for stage in STAGES:
        for gpus in GPUS:
            for gpu_gib in GPU_GIB:
                for host in HOST_GIB:
                    ours, theirs = (
                        _best(name, stage, gpus, gpu_gib, host) for name in (own, rival)
                    )
                    if ours and theirs:
                        found.append(ours.params / theirs.params)
    return found


def _any_way() -> list[float]:
    """For every machine, the size of our largest model over ZeRO-Offload's, each at its best stage
    and with weights where they fit best."""
    found = []
    for gpus in GPUS:
        for gpu_gib in GPU_GIB:
            for host in HOST_GIB:
                theirs, ours = (
                    max(
                        shape.params if shape else 0
                        for shape in (
                            *(_best(name, stage, gpus, gpu_gib, host) for stage in STAGES),
                            largest(weights_on_host, 3, gpus, gpu_gib, host),
                        )
                    )
                    for name, weights_on_host in zip((ZERO_OFFLOAD, OURS), SMALL, strict=True)
                )
                found.append(ours / theirs)
    return found


def _verdict() -> str:
    texts, free = [], _any_way()
    for rival in (ZERO_OFFLOAD, ZENFLOW):
        ratios = _ratios(rival)
        more, less = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
        texts.append(
            f"larger than {rival}'s in {more}, as large in {len(ratios) - more - less} "
            f"and smaller in {less} (median {statistics.median(ratios):.2f} times its size, "
            f"{min(ratios):.2f} to {max(ratios):.2f})"
        )
    rounded, coded = (statistics.median(_ratios(ZERO_OFFLOAD, OURS + end)) for end in MOMENTS)
    cases = len(STAGES) * len(GPUS) * len(GPU_GIB) * len(HOST_GIB)
    counts = [f"{_tokens(link, 8):,} on {link}" for link in LINKS]
    return (
        f"**On {sum(ratio > 1 for ratio in free)} of {len(free)} machines our largest model "
        f"is larger than {ZERO_OFFLOAD}'s, each at the stage and with weights where it is largest, "
        f"and smaller on {sum(ratio < 1 for ratio in free)} (median {statistics.median(free):.2f} "
        f"times its size, {min(free):.2f} to {max(free):.2f}).** In {cases} cases "
        f"(a machine and a stage, weights on the GPU) it is {texts[0]}; it is {texts[1]}. "
        f"With moments in bf16 it is {rounded:.2f} times the size of {ZERO_OFFLOAD}'s, "
        f"with those of 8 bits {coded:.2f} times (medians). "
        "With 8 GPUs ours hides the whole optimizer from these tokens per GPU and step on: "
        f"{', '.join(counts)}. {ZERO_OFFLOAD} and {ZENFLOW} expose a part of it in every step.\n"
    )


def _seconds(name: str, model: Model, ranks: Ranks, link: Link, stage: Stage = 3) -> StepTime:
    if name == ZENFLOW:
        return upstream.step(model, ranks, stage, link.machine)
    return link.time(model, ranks, setup_of(name, stage))


def _tokens(link: str, gpus: int, way: str = OURS) -> int:
    found, model = LINKS[link], Model(7 * 10**9, 10**8, "bfloat16")
    time = _seconds(way, model, Ranks(gpus, min(gpus, found.per_host)), found)
    return time.tokens(model.params, found.machine)


def _tokens_table() -> str:
    names = {
        "every step": OURS,
        "interval 2": "ZenFlow interval 2",
        "selective, interval 4": "ZenFlow selective",
    }
    rows = []
    for link in LINKS:
        for gpus in GPUS:
            cells = [f"{_tokens(link, gpus, way):,}" for way in names.values()]
            rows.append([link, str(gpus), *cells])
    return _table(["link", "GPUs", *names], rows)


def _time_rows(link: str) -> Iterator[list[str]]:
    found = LINKS[link]
    machine, ranks = found.machine, Ranks(8, found.per_host)
    for billions in SIZES:
        model = Model(billions * 10**9, 10**8, "bfloat16")
        ours, offload, zenflow = (
            _seconds(name, model, ranks, found) for name in (OURS, ZERO_OFFLOAD, ZENFLOW)
        )
        needs = f"{ours.tokens(model.params, machine):,}"
        yield [
            link,
            str(billions),
            f"{ours.beside:.2f}",
            needs,
            f"{offload.exposed:.2f}",
            f"{zenflow.exposed:.2f}",
        ]


def _time_table() -> str:
    head = [
        "link",
        "billions",
        "ours hides, s",
        "from tokens",
        "ZeRO-Offload exposes, s",
        f"{ZENFLOW} exposes, s",
    ]
    return _table(head, [row for link in LINKS for row in _time_rows(link)])


def _shapes() -> str:
    chosen = [
        min(SHAPES, key=lambda shape: abs(shape.params - billions * 1e9)) for billions in SIZES
    ]
    rows = [
        [f"{s.params / 1e9:.1f}", str(s.width), str(s.layers), f"{activation_bytes(s) / GIB:.1f}"]
        for s in chosen
    ]
    return _table(["billions", "width", "layers", "activations, GiB"], rows)


def _machines() -> str:
    rows = [
        [
            *(name, link.says, f"{link.machine.link / 1e9:g}", f"{link.up / 1e9:g}"),
            *(f"{link.machine.host / 1e9:.0f}", f"{link.machine.flops / 1e12:g}"),
        ]
        for name, link in LINKS.items()
    ]
    head = ["link", "machine", "down, GB/s", "up, GB/s", "host memory, GB/s", "TFLOP/s of a GPU"]
    return _table(head, rows)


INTRODUCTION = """# What fits, and what is hidden

<!-- Written by `make docs` from tools/fits.py and the plan of memory; edit those. -->

**Computed, not measured.** The numbers are those of [`deepspeed-ext plan --memory`](memory.md), whose bytes are
[within 2 %](design/memory_model.md) of runs on a simulated accelerator, and within 1 % of three
[on an H100](results/gpu.md#beside-the-plan). Times are bytes over assumed speeds: published steps of others took
[up to five times as long](design/time_model.md).

"""
MEMORY = """
## Why

Bytes per parameter, of 7 billion on 8 GPUs of one host, and in brackets the phase of a run that needs the most. The
host's are those of all ranks, the GPU's those of one, without activations. A run fits only if its peak does.
"DeepSpeed-ZenFlow" is DeepSpeed's own, overlapped; "ZenFlow exact" is ours at interval 1 with hidden transfers.

"""
LARGEST = """
With one GPU a whole gradient takes as much of it as the weights. So where gradients would take more than half of what
is free, ours copies them to the host during backward, as ZeRO-Offload does
([gradients on the host](zenflow.md#gradients-on-the-host)).

## Largest model

Billions of parameters of the largest dense model on one host: ZeRO-Offload / DeepSpeed-ZenFlow / ours / ours with
[moments in bf16](zenflow.md#moments-in-bf16) / ours with those [of 8 bits](zenflow.md#moments-of-8-bits); these two are
not exact. Weights in bf16, DeepSpeed 0.19.8. **Bold**: ours, exact, is the largest of the first three. A number that
stays the same to the right is limited by the GPU. `-`: not even 0.08 billion. Ours copies beside the next step where a
GPU has room for that, otherwise in the step, and gradients during backward where it has no room for them, as a run
chooses by itself. The last column is FlashOptim's AdamW, which keeps everything on the GPU and is nearly exact: weights
of 24 bits, moments of 8.

"""
OWNED_TEXT = """
### Machines that people own

The same for some machines, each way at the stage where it is largest. FlashOptim keeps everything on the GPU, 7 bytes
per parameter, so the host plays no role.

"""
SMALL_TEXT = """
### Weights on the host

At stage 3 with `offload_param`: ZeRO-Offload / ours. The host then limits nearly every case.

"""
TIME = """
## What is hidden

Tokens per GPU and optimizer step from which ours exposes nothing of the optimizer. They are the same for every dense
model, because transfers, the pass, forward and backward all grow with its parameters. With experts, multiply by all
parameters over those that a token uses. The host's memory decides at interval 1: on PCIe all GPUs share it, so more
GPUs change nothing; with NVLink-C2C every GPU brings a host. With half of the assumed speed of the host it takes twice
the tokens; most published runs reached [9 to 76 %](design/time_model.md#what-explains-the-bad-rows) of it.

"""
SECONDS = """
What a step of 8 GPUs hides or exposes, in seconds. ZeRO-Offload exposes AdamW and the weights' way up.
DeepSpeed-ZenFlow exposes the unscaling of gradients and a copy of fp32 weights, once in its interval of 4 micro-steps;
it updates most weights late.

"""
ASSUMED = """
## Assumptions

- **Models**: Llama's shape. Heads of 128, as many layers as heads, 12 d^2 parameters per layer, embedding and output of
  32,768 rows; widths in steps of 64. One parameter group, AdamW, nothing frozen.
- **Activations**: one sequence of 4,096 tokens per GPU and micro-step. The inputs of layers are kept and the rest is
  recomputed, without an attention matrix (FlashAttention). They count in forward and backward. Longer sequences and
  larger micro-batches come on top.
- **Free**: 2 GiB of each GPU for its context, collectives and fragmentation; 8 GiB of the host, and half a GiB of it
  for each rank.
- **GB** are GiB, as makers write memory. The whole run counts: start-up, steps, and saves of a checkpoint and of the
  model alone. To load a checkpoint may take more (see `plan --memory`).
- **Start-up** at stage 2 takes the [flatten tier](flattening.md) with which most fits, for all three. DeepSpeed by
  itself has fewer, and may need more.
- **DeepSpeed-ZenFlow** was read in its source: ZeRO-Offload with gradient accumulation, and 16 bytes per parameter more
  on the host. That is 36 at stage 2 without page-locking, where 36.4 were
  [measured](results/zenflow_step.md#memory).
- **FlashOptim**: 7 bytes per parameter as its documentation says, gradient included; at stage 2 on each GPU (DDP), at
  stage 3 divided among them (FSDP2), with two layers gathered. Not run here.
- **Page-locked memory**: DeepSpeed's is torch's, which takes a power of two of bytes for each array, as [an
  H100](results/gpu.md#beside-the-plan) showed. With `"pin_memory": false` ZeRO-Offload holds 18.2 bytes at stage 2.

"""
SPEEDS = """
Those of the [time model](design/time_model.md#inputs): links as others have measured them,
host memory at 80 % of its peak, GPUs at half of their dense 16-bit peak. Grace-Hopper's link
is not the same both ways: others measured 411 to
421 GB/s up and 170 down on four superchips, and [346 up, 15 % less down](https://github.com/NVIDIA/nvbandwidth/issues/23)
on another. The slower figures down decide what gradients take, and are used here; the time model has 300 each way.

"""


def markdown() -> str:
    """The page."""
    parts = [INTRODUCTION, _verdict(), MEMORY, _bytes_table(), LARGEST]
    for gpu_gib in GPU_GIB:
        parts += [f"### GPUs of {gpu_gib} GB\n\n", _memory_table(gpu_gib), "\n"]
    parts[-1:] = [
        OWNED_TEXT,
        _owned_table(),
        SMALL_TEXT,
        _small_table(),
        TIME,
        _tokens_table(),
        SECONDS,
        _time_table(),
    ]
    parts += [ASSUMED, _shapes(), SPEEDS, _machines()]
    return "".join(parts)


def main() -> None:
    PAGE.write_text(markdown())


if __name__ == "__main__":
    main()
