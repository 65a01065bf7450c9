"""The parts of `make bench-gpu`: all that a machine with an accelerator can measure."""

from __future__ import annotations

import re
from typing import Any

from tests.perf import gpu_time, report, sides
from tests.perf.bench_offload_step import ALONE_SIDES, FEWEST_STEPS, with_practicality
from tests.perf.part import Part, operators

PARAMETERS = {"0.5b": 5e8, "1.5b": 1.5e9, "3b": 3e9, "7b": 6.74e9}
BATCHES = ((1, 2048), (1, 8192), (4, 8192))
"""Sequences of a step, and tokens of each."""
FIRST = "1.5b"
FIRST_SIDES = (sides.ZERO, sides.PREDICTIVE_1, sides.OFFLOAD_DEEPSPEED, sides.UPSTREAM_OVERLAPPED)
"""Of the steps: if time is short, these are measured."""
TURNS, STEPS = 3, 4
GLOO = "two ranks on one device, through gloo: says nothing of NCCL"
TIMES = ("median ms", "least ms", "most ms", "longest step ms", "wait ms", "worker ms")
STEP_COLUMNS = (*TIMES, "tokens/s", "idle share, no kernel", "device GiB", "host GiB", "practicality")


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them; what ten minutes have room for comes first."""
    steps = _steps()
    first = [step for step in steps if step.is_in([f"step/{FIRST}"])]
    return [
        operators("operators"),
        _kernels(),
        _bandwidth(),
        *(_startup(*row) for row in ((1000, 1, 240), (1000, 2, 300), (3000, 1, 300), (3000, 2, 400))),
        *first,
        _startup(7000, 1, 500),
        *(step for step in steps if step not in first),
        _gather(),
        _convergence(),
    ]


def _bandwidth() -> Part:
    return Part(
        "bandwidth",
        "tests.perf.bandwidth",
        ("--mib", "1024"),
        ("--mib", "4"),
        120,
        "bandwidth",
        "bandwidth",
        usual=gpu_time.START_SECONDS + 15,
        covers="copies within and between device and host",
    )


def _kernels() -> Part:
    return Part(
        "kernels",
        "tests.perf.bench_kernels",
        ("--millions", "256"),
        ("--millions", "1", "--turns", "1"),
        120,
        "kernels",
        "kernels",
        usual=gpu_time.START_SECONDS + 10,
        covers="device kernels beside torch operations and a copy",
    )


def _startup(millions: int, ranks: int, limit: float) -> Part:
    return Part(
        f"startup/{millions // 1000}b/{ranks}-rank",
        "tests.perf.bench_startup",
        ("--millions", str(millions), "--ranks", str(ranks), "--repeats", "3"),
        ("--millions", "1", "--ranks", str(ranks), "--repeats", "1"),
        limit,
        f"startup_{millions}m_{ranks}ranks",
        "startup",
        usual=gpu_time.startup(millions * 1e6, ranks, repeats=3),
        covers="construction of the ZeRO-2 optimizer" + (f", {GLOO}" if ranks > 1 else ""),
        ranks=ranks,
    )


def _gather() -> Part:
    both = ("--ranks", "2", "--dtype", "bfloat16")
    return Part(
        "gather",
        "tests.perf.bench_gather",
        (*both, "--sizes", "medium", "large", "huge", "--repeats", "5", "--steps", "3"),
        (*both, "--sizes", "tiny", "--repeats", "1", "--steps", "1"),
        400,
        "gather",
        "gather",
        usual=120,
        covers=f"memory of a ZeRO-3 fetch, {GLOO}",
        ranks=2,
    )


def _convergence() -> Part:
    return Part(
        "convergence",
        "tests.perf.bench_convergence",
        ("--rows", "adamw", "predictive", "--seeds", "1", "--model", "100m", "--steps", "300", "--reuse"),
        ("--rows", "adamw", "--seeds", "1", "--quick", "--reuse"),
        540,
        "convergence_100m",
        "convergence_quick",
        usual=gpu_time.convergence(1e8, 16 * 512, steps=300, rows=3),
        covers="losses of a byte model, ours beside AdamW",
    )


def _steps() -> list[Part]:
    models = sorted(PARAMETERS, key=lambda model: model != FIRST)
    ordered = sorted(ALONE_SIDES, key=lambda side: FIRST_SIDES.index(side) if side in FIRST_SIDES else len(FIRST_SIDES))
    return [_step(model, side) for model in models for side in ordered]


def _step(model: str, side: sides.Side) -> Part:
    only = ("--only", side.name)
    batches = ["x".join(map(str, batch)) for batch in BATCHES]
    steps = 2 * max(FEWEST_STEPS, side.interval) + TURNS * STEPS
    return Part(
        f"step/{model}/{slug(side.name)}",
        "tests.perf.bench_offload_step",
        ("--model", model, *only, "--batches", *batches, "--turns", str(TURNS), "--steps", str(STEPS)),
        ("--model", "toy", *only, "--batches", "1x32", "2x32", "--turns", "1", "--steps", "4"),
        400,
        f"offload_step_{model}",
        "offload_step_toy",
        usual=gpu_time.step(
            PARAMETERS[model],
            [rows * length for rows, length in BATCHES],
            steps,
            offloads=side is not sides.ZERO,
            overlaps=side.extended,
        ),
        covers=f"steps of a decoder, {side.name}",
    )


def step_tables(results: dict[str, Any]) -> list[str]:
    """A table for each model whose steps were measured."""
    blocks = []
    for name, kept in results.items():
        rows = kept["rows"] if name.startswith("offload_step_") else []
        if rows:
            columns = dict.fromkeys(("variant", "batch"), "") | dict.fromkeys(STEP_COLUMNS, ".2f")
            blocks.append(f"{name}\n\n{report.table(with_practicality(rows), columns)}")
    return blocks
