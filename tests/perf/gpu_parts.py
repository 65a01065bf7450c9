"""The parts of `make bench-gpu`: all that a machine with an accelerator can measure."""

from __future__ import annotations

import re
from typing import Any

from tests.perf import report
from tests.perf.bench_offload_step import ALONE_SIDES
from tests.perf.part import Part

SEQUENCES = {"0.5b": (512, 2048, 8192), "1.5b": (512, 2048, 8192), "3b": (512, 2048, 8192)}
TIMES = ("median ms", "p95 ms", "max ms", "wait ms")
STEP_COLUMNS = ("variant", *TIMES, "idle share, no kernel", "device GiB", "host GiB")


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them, the short ones first."""
    found = [
        Part("operators", "tools.build_operators", (), (), 300),
        Part("bandwidth", "tests.perf.bandwidth", ("--mib", "1024"), ("--mib", "4"), 120, "bandwidth", "bandwidth"),
    ]
    real: tuple[str, ...]
    toy: tuple[str, ...]
    for millions, ranks, limit in ((1000, 1, 240), (1000, 2, 300), (3000, 1, 300), (3000, 2, 400), (7000, 1, 500)):
        name = f"startup/{millions // 1000}b/{ranks}-rank"
        real = ("--millions", str(millions), "--ranks", str(ranks), "--repeats", "3")
        toy = ("--millions", "1", "--ranks", str(ranks), "--repeats", "1")
        found.append(
            Part(name, "tests.perf.bench_startup", real, toy, limit, f"startup_{millions}m_{ranks}ranks", "startup")
        )
    gather = ("--ranks", "2", "--dtype", "bfloat16")
    real = (*gather, "--sizes", "medium", "large", "huge", "--repeats", "5", "--steps", "3")
    toy = (*gather, "--sizes", "tiny", "--repeats", "1", "--steps", "1")
    found.append(Part("gather", "tests.perf.bench_gather", real, toy, 400, "gather", "gather"))
    found += _steps()
    real = ("--rows", "adamw", "predictive", "--seeds", "1", "--model", "100m", "--steps", "300", "--reuse")
    toy = ("--rows", "adamw", "--seeds", "1", "--quick", "--reuse")
    found.append(
        Part("convergence", "tests.perf.bench_convergence", real, toy, 540, "convergence_100m", "convergence_quick")
    )
    return found


def _steps() -> list[Part]:
    found = []
    for model, sequences in SEQUENCES.items():
        for sequence in sequences:
            for side in ALONE_SIDES:
                name = f"step/{model}/{sequence}/{slug(side.name)}"
                real: tuple[str, ...] = ("--model", model, "--sequence", str(sequence), "--only", side.name)
                real += ("--turns", "4", "--steps", "8")
                toy = ("--model", "toy", "--sequence", "32", "--only", side.name, "--turns", "1", "--steps", "4")
                result = f"offload_step_{model}_{sequence}"
                found.append(Part(name, "tests.perf.bench_offload_step", real, toy, 300, result, "offload_step_toy_32"))
    return found


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
