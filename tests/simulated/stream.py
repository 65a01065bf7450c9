"""Compares what steps wait for their optimizer with a walk through their chunks. Simulated, not
measured.

    python -m tests.simulated.stream FILE    # a row per line; goes on where it ended

Gradients leave in backward at stage 3. The forward is a third of a step's operators here. With
8-bit moments passes and peeks take the share of their bytes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tests.simulated.overlap import OPERATOR_US, Way, figures
from tests.support.schedules import Machine, exact, zero_offload

LAYERS, CHUNKS = 32, 16
PASSES, LINK = (0.25, 0.5, 1.0, 2.0, 4.0), 0.14
"""What the pass and the copies each way take, in steps without both."""
BETWEEN = 2
"""Operators of the accelerator between the step's tasks and the forward."""
SETTLING_STEPS = 16
"""Until the share of peeks has found its place."""
LEAVES = ("gradients_on_host", True)
WAYS = {
    "exact": (("update_rule", "exact"), LEAVES),
    "predictive": (("update_rule", "predictive"), LEAVES),
    "in the step": (("overlap_step", False), LEAVES),
}
MOVED = {"float32": (28.0, 16.0, 6.0), "int8": (16.2, 10.1, 6.0)}
"""Bytes per element of a pass, a peek and a prediction."""


def row(ranks: int, moments: str, name: str) -> list[str]:
    """For each pass, what a step waits and what the walk says, in steps."""
    whole, peek, prediction = MOVED[moments]
    parts = {"PEEK_OF_PASS": peek / whole, "PREDICTION_OF_PASS": prediction / whole}
    section = (*WAYS[name], ("state_dtype", moments), ("autotune", False))
    way = Way(3, ranks, 1, False, LAYERS, CHUNKS, section, SETTLING_STEPS)
    cells, loads = [], [(LINK, each) for each in PASSES]
    for (link, worker), found in zip(loads, figures(way, loads, parts), strict=True):
        operator = OPERATOR_US * found["step"] / found["us"]
        forward, between = LAYERS * operator, BETWEEN * operator
        early = {"exact": parts["PEEK_OF_PASS"], "predictive": parts["PREDICTION_OF_PASS"]}
        every = name == "predictive"  # gradients have two slots, so passes may take the whole step
        rest = 1.0 - forward - (between if every else found["after"])
        machine = Machine(forward, rest, link, worker, CHUNKS, None, between)
        said = exact(machine, early[name] * worker, every=every) if name in early else None
        off = "" if said is None else f", {(found['step'] - 1.0 - said) / (1.0 + said):+.1%}"
        cells.append(f"{found['step'] - 1.0:.3f}{off}; {zero_offload(machine):.3f}")
    return cells


def main(path: Path) -> None:
    for ranks, moments, name in itertools.product((1, 2), MOVED, WAYS):
        begin = f"| {ranks} | {moments} | {name} |"
        if not path.exists() or begin not in path.read_text():
            with path.open("a") as page:
                page.write(f"{begin} {' | '.join(row(ranks, moments, name))} |\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
