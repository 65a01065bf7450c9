"""Compares what steps of the exact rule wait for their optimizer with what its schedule says. A
simulation, not a device.

    python -m tests.simulated.stream            # engines beside the schedule, and other ways

Gradients leave in backward at stage 3, so the worker peeks at every chunk before it steps. Its
forward takes about a fifth of a step here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tests.perf import report
from tests.simulated.overlap import OPERATOR_US, Way, figures
from tests.support import schedules
from tests.support.schedules import Machine
from tests.support.simulated_accelerator.worker_time import PEEK_OF_PASS

LAYERS, STEPS = 64, 3
PASSES, LINKS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.05, 0.2)
"""Shares of a step that the pass and the copies each way take."""
BETWEEN = 2
"""Operators of the accelerator between backward and the forward."""
LEAVES = ("gradients_on_host", True)
EXACT = (("update_rule", "exact"), LEAVES)
TODAY = (("update_rule", "predictive"), LEAVES)


def way_of(section: Any, ranks: int = 1, chunks: int = 32, layers: int = LAYERS) -> Way:
    """A run at stage 3 whose gradients leave in backward."""
    return Way(3, ranks, 1, False, layers, chunks, section=section, steps=STEPS)


def machine_of(way: Way, load: tuple[float, float], step_us: float) -> Machine:
    """What the schedule is told of such a run: link and worker are given, the accelerator's part
    is counted in operators."""
    operator, (link, worker) = OPERATOR_US / step_us, load
    forward, between = way.layers * operator, BETWEEN * operator
    return Machine(forward, 1.0 - forward - between, link, worker, way.chunks, None, between)


def waits(way: Way, loads: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """For each load, link and worker in steps: what an engine's step waits, and what its schedule
    says, in steps without link and worker."""
    for load, found in zip(loads, figures(way, list(loads)), strict=True):
        machine = machine_of(way, load, found["us"] / found["step"])
        yield found["step"] - 1.0, schedules.exact(machine, PEEK_OF_PASS * load[1])


def rows() -> Iterator[dict[str, Any]]:
    """What a step waits, in steps, for each number of ranks, link and pass."""
    loads = list(itertools.product(LINKS, PASSES))
    for ranks in (1, 2):
        way = way_of(EXACT, ranks)
        today = figures(way_of(TODAY, ranks), loads)
        steps = figures(way_of((("overlap_step", False), LEAVES), ranks), loads)
        for load, (found, said), late, waiting in zip(
            loads, waits(way, loads), today, steps, strict=True
        ):
            machine = machine_of(way, load, late["us"] / late["step"])
            yield {
                "ranks": ranks,
                "link": load[0],
                "pass": load[1],
                "exact": found,
                "exact, expected": said,
                "off, of the step": (found - said) / (1.0 + said),
                "predictive": late["step"] - 1.0,
                "`overlap_step: false`": waiting["step"] - 1.0,
                "ZeRO-Offload, at best": schedules.zero_offload(machine),
            }


def main() -> None:
    found = list(rows())
    print(report.table(found, dict.fromkeys(found[0], _cell)))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
