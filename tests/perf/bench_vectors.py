"""The worker's pass with and without AVX-512 beside torch's fused AdamW, in many short turns.

    python -m tests.perf.bench_vectors [--numel 16777216] [--threads 1 2] [--turns 25]

"before" is the pass by its definition, as the compiler makes it for this CPU; "after" is the pass
in AVX-512, which writes the same bits. All of one turn follow each other, A B A B, on the same
number of threads; arrays lie where the arena places them. Numbers are nanoseconds of CPU time of a
thread for each of its elements, so what others take of the CPU is not counted, but what they take
of its caches and memory is. "ratio" has the quartiles, with the median, of the ratio to fused AdamW
in the same turn. "by the wall" is the ratio of the best times, which other work does make longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from typing import Any

import torch

from deepspeed_ext.zenflow.plan.arrays import plan_layout
from deepspeed_ext.zenflow.worker.kernel import NativeKernel, library_path
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from tests.perf import report
from tests.perf.bench_cpu_adam import Contender, pass_arena, pass_runner, placed_fused_runner

FUSED = "torch fused AdamW"
MOMENTS = {"fp32": "float32", "bf16": "bfloat16", "8 bits": "int8"}


def contenders(numel: int, threads: int) -> dict[str, Contender]:
    """Everything that is timed; passes of the same moments share their arrays."""
    path = library_path()
    assert path is not None, "there is no native kernel to be timed"
    found = {FUSED: Contender(placed_fused_runner(numel), 28)}
    for name, dtype in MOMENTS.items():
        arena = pass_arena(numel, plan_layout, replace(ADAM_STATE, moment_dtype=dtype))
        for when, vectors in (("before", False), ("after", True)):
            run = pass_runner(NativeKernel(path, threads, vectors=vectors), arena, 1)
            found[f"{name}, {when}"] = Contender(run, 0)
    return found


def rows_of(numel: int, threads: int, found: dict[str, Contender]) -> list[dict[str, Any]]:
    """A row a contender."""
    rows = []
    for name, one in found.items():
        ns = [1e9 * seconds / numel for seconds in one.cpu]
        fused = found[FUSED]
        ratios = [ours / theirs for ours, theirs in zip(one.cpu, fused.cpu, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "threads": threads,
                "contender": name,
                "ns": round(statistics.median(ns), 3),
                "best": round(min(ns), 3),
                "ratio": " to ".join(f"{each:.2f}" for each in quartiles),
                "by the wall": round(min(one.wall) / min(fused.wall), 2),
                "cores": round(one.cores, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the partition")
    every = sorted({1, len(os.sched_getaffinity(0))})
    parser.add_argument("--threads", type=int, nargs="+", default=every)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in options.threads:
        found = contenders(options.numel, threads)
        for turn in range(1 + options.turns):
            for one in found.values():
                one.time(threads)
                if turn == 0:  # it touches the memory
                    one.wall.clear()
                    one.cpu.clear()
        rows += rows_of(options.numel, threads, found)
    print(report.table(rows, dict.fromkeys(rows[0], report.shown)))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{report.cpu_model()}, torch {torch.__version__}, commit {report.commit()}, load {load}")


if __name__ == "__main__":
    main()
