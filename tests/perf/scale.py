"""Rehearses the scale of the package: one rank's planning and exchange among 8 to 8,192 ranks, all
others made up.

    python -m tests.perf.scale [--ranks 8 64 1024 8192] [--only TEXT] [--plot
    docs/lab/archive/scale.svg]

Prints a table for `docs/lab/archive/scale.md`. Seconds are one thread's CPU time
without the made-up collectives, the median of several runs; bytes are what arrives at one
rank; memory is the peak of Python's allocations (`tracemalloc`).
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepspeed_ext.runtime.log import logger
from tests.perf import report
from tests.perf.scale_systems import SYSTEMS, System
from tests.support.rehearsed_ranks import rehearsed_ranks

RANKS = (8, 64, 1024, 8192)
REPEATS = 5
SLOW_SECONDS = 2.0
ROWS = (
    ("start",),
    ("before a run", "each step", "each selection"),
    ("load", "save, load"),
    ("error",),
)
"""Rows of the figure: the systems of these times of a run."""


@dataclass(frozen=True)
class Measured:
    """One system among one number of ranks.

    Attributes:
        ranks: number of ranks.
        seconds: median of the CPU seconds of a run.
        received: bytes that arrive at one rank in a run.
        collectives: collectives of a run.
        peak: most bytes of Python objects during a run.
    """

    ranks: int
    seconds: float
    received: int
    collectives: int
    peak: int


def measure(system: System, size: int, repeats: int = REPEATS) -> Measured:
    """Rehearse `system` on one of `size` ranks."""
    with tempfile.TemporaryDirectory() as folder, rehearsed_ranks(size) as (ranks, rehearsal):
        run = system.prepare(ranks, rehearsal, Path(folder))
        seconds, begin = list[float](), time.monotonic()
        while len(seconds) < repeats and (not seconds or time.monotonic() - begin < SLOW_SECONDS):
            rehearsal.received, rehearsal.seconds = 0, 0.0
            rehearsal.calls.clear()
            before = time.thread_time()
            run()
            seconds.append(time.thread_time() - before - rehearsal.seconds)
        received, collectives = rehearsal.received, rehearsal.collectives
        gc.collect()
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return Measured(size, statistics.median(seconds), received, collectives, peak)


def exponent(found: Sequence[Measured], quantity: str) -> float:
    """Slope of the quantity over the ranks, both in logarithms: 0 constant, 1 linear; by least
    squares."""
    points = [
        (math.log(each.ranks), math.log(max(getattr(each, quantity), 1e-9))) for each in found
    ]
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )


def table(found: dict[str, list[Measured]], whens: dict[str, str]) -> str:
    """The results as Markdown."""
    counts = [each.ranks for each in next(iter(found.values()))]
    lines = []
    for title, quantity, unit in (
        ("Bytes that arrive at one rank", "received", 1),
        ("Collectives", "collectives", 1),
        ("Milliseconds of one rank", "seconds", 1e3),
        ("KiB of Python objects at the peak", "peak", 1 / 1024),
    ):
        lines += [
            f"\n{title}:\n",
            f"| what | when | {' | '.join(f'{n:,}' for n in counts)} | a doubling | exponent |",
        ]
        lines.append("|" + " --- |" * (len(counts) + 4))
        for name, row in found.items():
            cells = [_number(getattr(each, quantity) * unit) for each in row]
            slope = exponent(row, quantity) if getattr(row[-1], quantity) else 0.0
            lines.append(
                f"| {name} | {whens[name]} | {' | '.join(cells)} | {2**slope:.2f} | {slope:.2f} |"
            )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def plot(found: dict[str, list[Measured]], whens: dict[str, str], path: Path) -> None:
    """Draw seconds and bytes over the number of ranks: a row for each time of a run, with few lines
    in each."""
    from matplotlib.figure import Figure

    times = {row: [name for name in found if whens[name] in row] for row in ROWS}
    times = {row: names for row, names in times.items() if names}
    figure = Figure(figsize=(11, 2.7 * len(times) + 0.5), layout="constrained")
    grid = figure.subplots(len(times), 2, sharex=True, squeeze=False)
    for (left, right), (row, names) in zip(grid, times.items(), strict=True):
        for number, name in enumerate(names):
            style = {
                "marker": "osv^Dx"[number % 6],
                "markersize": 4,
                "linewidth": 1,
                "color": f"C{number}",
            }
            ranks = [each.ranks for each in found[name]]
            left.plot(ranks, [max(each.seconds, 1e-6) for each in found[name]], **style)
            right.plot(ranks, [max(each.received, 1) for each in found[name]], label=name, **style)
        when = ", ".join(dict.fromkeys(", ".join(row).split(", ")))
        left.set_title(f"{when}: seconds of one rank", loc="left", fontsize=9)
        right.set_title(f"{when}: bytes that arrive", loc="left", fontsize=9)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("ranks")
    figure.suptitle("A rehearsal: one real rank, all other ranks made up", fontsize=10)
    figure.savefig(path, format=path.suffix.removeprefix("."), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--only", default="", help="systems whose name contains this")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    systems = [system for system in SYSTEMS if arguments.only in system.name]
    found = {system.name: [measure(system, size) for size in arguments.ranks] for system in systems}
    whens = {system.name: system.when for system in systems}
    print(table(found, whens))
    if arguments.plot:
        plot(found, whens, arguments.plot)
    rows = [
        {"what": name, "when": whens[name], **asdict(each)}
        for name, row in found.items()
        for each in row
    ]
    settings = {"ranks": arguments.ranks, "simulation": "one real rank, all others made up"}
    print(f"\nwritten to {report.write('scale', settings, rows)}")


if __name__ == "__main__":
    main()
