"""The parts of `make bench-gpu`: all that a machine with an accelerator can measure."""

from __future__ import annotations

import re
from typing import Any

from tests.perf import gpu_time, report, sides
from tests.perf.bench_offload_step import ALONE_SIDES, PROFILED_STEPS, WARM_UP_STEPS
from tests.perf.part import Part, operators

PARAMETERS = {"0.5b": 5e8, "1.5b": 1.5e9, "3b": 3e9}
SEQUENCES = (512, 2048, 8192)
FIRST = ("1.5b", 2048)
FIRST_SIDES = (sides.ZERO, sides.PREDICTIVE_1, sides.OFFLOAD_DEEPSPEED)
"""Of the steps: if time is short, these are measured."""
TURNS, STEPS = 4, 8
GLOO = "two ranks on one device, through gloo: says nothing of NCCL"
TIMES = ("median ms", "p95 ms", "max ms", "wait ms")
STEP_COLUMNS = ("variant", *TIMES, "idle share, no kernel", "device GiB", "host GiB")


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them; what ten minutes have room for comes first."""
    steps = _steps()
    first = [step for step in steps if step.is_in([f"step/{'/'.join(map(str, FIRST))}"])]
    return [
        operators("operators"),
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
    shapes = [(model, sequence) for model in PARAMETERS for sequence in SEQUENCES]
    shapes.sort(key=lambda shape: shape != FIRST)
    ordered = sorted(ALONE_SIDES, key=lambda side: FIRST_SIDES.index(side) if side in FIRST_SIDES else len(FIRST_SIDES))
    return [_step(model, sequence, side) for model, sequence in shapes for side in ordered]


def _step(model: str, sequence: int, side: sides.Side) -> Part:
    real = ("--model", model, "--sequence", str(sequence), "--only", side.name)
    toy = ("--model", "toy", "--sequence", "32", "--only", side.name, "--turns", "1", "--steps", "4")
    steps = WARM_UP_STEPS + TURNS * STEPS + PROFILED_STEPS
    ours = side in (sides.PREDICTIVE_1, sides.PREDICTIVE_4, sides.SELECTIVE_4_LAG)
    return Part(
        f"step/{model}/{sequence}/{slug(side.name)}",
        "tests.perf.bench_offload_step",
        (*real, "--turns", str(TURNS), "--steps", str(STEPS)),
        toy,
        300,
        f"offload_step_{model}_{sequence}",
        "offload_step_toy_32",
        usual=gpu_time.step(PARAMETERS[model], sequence, steps, offloads=side is not sides.ZERO, overlaps=ours),
        covers=f"steps of a decoder, {side.name}",
    )


def step_tables(results: dict[str, Any]) -> list[str]:
    """A table for each model and sequence whose steps were measured."""
    blocks = []
    for name, kept in results.items():
        rows = kept["rows"] if name.startswith("offload_step_") else []
        if rows:
            zero = next((row["median ms"] for row in rows if row["variant"] == "ZeRO"), None)
            shown = [row | {"practicality": None if zero is None else zero / row["median ms"]} for row in rows]
            columns = {column: "" if column == "variant" else ".2f" for column in (*STEP_COLUMNS, "practicality")}
            blocks.append(f"{name}\n\n{report.table(shown, dict(columns))}")
    return blocks
