"""Compare what steps of the exact rule wait for their optimizer with what its schedule says, and
with other schedules. A simulation, not a device.

    python -m tests.simulated.exact            # the grid: engines on the simulated accelerator
    python -m tests.simulated.exact --rules    # beside other rules and schedules
    python -m tests.simulated.exact --picture docs/lab/archive/exact_rule.svg

Engines are those of `tests.simulated.overlap`. Their forward takes a fifth of a step. The picture
needs matplotlib (the extra `plots`) and takes the schedules alone.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.perf import report
from tests.simulated.overlap import OPERATOR_US, Way, figures
from tests.support import schedules
from tests.support.schedules import Machine

LAYERS, STEPS = 64, 3
CHUNKS = (8, 32)
PASSES, LINKS = (0.1, 0.2, 0.4, 0.8, 2.0), (0.05, 0.3, 1.0)
"""Shares of a step that the pass and the copies each way take."""
LINK_OF_PASS = 0.15
"""Copies each way over the pass, as on the H200: 54 and 348 ms."""
BETWEEN = 2
"""Operators of the accelerator after the gradients have left, before the forward."""
EXACT = (("update_rule", "exact"),)
FORWARD = 0.25
"""Of a step in the picture, with recomputed activations."""
CLIPPED = (0.0, 0.0012, 0.1, 1.0)
"""Shares of the steps whose norm exceeds the bound. SuperOffload's authors count 93 of 79,000."""
KEPT = 0.25


def exact_way(chunks: int, ranks: int = 1, layers: int = LAYERS) -> Way:
    """A run under the exact rule at stage 3, whose weights arrive in the forward."""
    return Way(3, ranks, 1, True, layers, chunks, section=EXACT, steps=STEPS)


def machine_of(way: Way, load: tuple[float, float], step_us: float) -> Machine:
    """What the schedule is told of such a run: link and worker are given, the accelerator's part
    is counted in operators. A chunk's copy to the weights belongs to the forward."""
    operator, (link, worker) = OPERATOR_US / step_us, load
    forward = (way.layers + way.chunks) * operator
    between = BETWEEN * operator
    backward = 1.0 - forward - between
    return Machine(forward, backward, link, worker, way.chunks, way.slots, between)


def waits(way: Way, loads: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """For each load, link and worker in steps: what an engine's step waits, and what its schedule
    says, in steps without link and worker."""
    for load, found in zip(loads, figures(way, list(loads)), strict=True):
        step_us = found["us"] / found["step"]
        yield found["step"] - 1.0, schedules.exact(machine_of(way, load, step_us))


def grid() -> Iterator[dict[str, Any]]:
    """A row for each run, link and pass."""
    loads = list(itertools.product(LINKS, PASSES))
    for way in (*map(exact_way, CHUNKS), exact_way(CHUNKS[-1], ranks=2)):
        for (link, worker), (found, said) in zip(loads, waits(way, loads), strict=True):
            yield {
                "ranks": way.ranks,
                "chunks": way.chunks,
                "link": link,
                "pass": worker,
                "waits": found,
                "expected": said,
                "difference": found / said - 1.0,
            }


def rules() -> Iterator[dict[str, Any]]:
    """A row for each pass: what steps wait at stage 3. The first four are engines on the simulated
    accelerator, the others schedules."""
    loads = [(LINK_OF_PASS * worker, worker) for worker in PASSES]
    way = exact_way(CHUNKS[-1])
    exact = list(waits(way, loads))
    predictive = figures(replace(way, section=()), loads)
    waiting = figures(replace(way, section=(("overlap_step", False),)), loads)
    for load, (found, said), ahead, late in zip(loads, exact, predictive, waiting, strict=True):
        machine = machine_of(way, load, ahead["us"] / ahead["step"])
        row = {"pass": load[1], "predictive": ahead["step"] - 1.0, "exact": found}
        row |= {"exact, expected": said, "`overlap_step: false`": late["step"] - 1.0}
        yield {**row, **others(machine)}


def others(machine: Machine) -> dict[str, float]:
    """What steps wait with the schedules of others."""
    speculative = schedules.speculative
    row = {"ZeRO-Offload, at best": schedules.zero_offload(machine)}
    row |= {
        f"SuperOffload's, {part:.2%} clipped": speculative(machine, clipped=part)
        for part in CLIPPED
    }
    row[f"{KEPT:.0%} on the GPU, none clipped"] = speculative(machine, kept=KEPT)
    return row


def draw(path: Path) -> None:
    """What a step waits over the pass, and over how often the norm exceeds its bound."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "exact"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    passes = [0.02 * number for number in range(1, 76)]
    machines = [of_picture(worker) for worker in passes]
    lines = {
        "ZeRO-Offload, at best": ("#ee6677", schedules.zero_offload),
        "exact": ("#4477aa", schedules.exact),
        "SuperOffload's, nothing clipped": ("#ccbb44", schedules.speculative),
        "predictive": ("#228833", schedules.predictive),
    }
    for name, (color, schedule) in lines.items():
        left.plot(passes, [schedule(machine) for machine in machines], color=color, label=name)
    clipped = [0.01 * number for number in range(101)]
    machine = of_picture(0.5)
    for name, (color, schedule) in lines.items():
        values = [schedule(machine)] * len(clipped)
        if schedule is schedules.speculative:
            name = "SuperOffload's"
            values = [schedules.speculative(machine, clipped=part) for part in clipped]
        right.plot(clipped, values, color=color, label=name)
    left.set(xlabel="pass, in steps", ylabel="a step waits, in steps", ylim=(-0.02, 1.5))
    right.set(xlabel="part of the steps whose norm exceeds its bound; pass 0.5 of a step")
    left.set_title("models of schedules, not measured", fontsize=9, loc="left")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def of_picture(worker: float) -> Machine:
    return Machine(FORWARD, 1.0 - FORWARD, LINK_OF_PASS * worker, worker, 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", action="store_true", help="beside other rules and schedules")
    parser.add_argument("--picture", type=Path, help="only draw this SVG file")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw(arguments.picture)
        return
    rows = []
    for row in rules() if arguments.rules else grid():
        rows.append(row)
        print(row, flush=True)
    print(report.table(rows, dict.fromkeys(rows[0], _cell)))


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
