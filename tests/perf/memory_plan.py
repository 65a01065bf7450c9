"""What ``deepspeed-ext plan --memory`` says, beside what runs on the simulated accelerator hold. A
simulation.

    python -m tests.perf.memory_plan [--ranks 2] [--accumulation 1 2]

Bytes per parameter of the model, planned / measured, of the rank that holds the most. The selective
rule runs on one rank: on several, ranks differ in how many blocks are hot, which a plan cannot
know.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place
from tests.perf import report
from tests.support.memory_runs import PARAMS, WAYS, compared, memory_config
from tests.support.ranks import close_pools

TOLERANCE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), metavar="WAY", help=f"of {list(WAYS)}"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    print(f"{PARAMS:,} parameters; planned / measured bytes per parameter")
    rows = [
        row
        for stage, way, accumulation in product(
            arguments.stages, arguments.ways, arguments.accumulation
        )
        if stage > 1 or "gradients_on_host" not in way
        for row in rows_of(stage, way, accumulation, 1 if "selective" in way else arguments.ranks)
    ]
    close_pools()
    for place in Place:
        shown = [row for row in rows if row["place"] == place.value]
        columns = dict.fromkeys(
            ("stage", "run", "ranks", "micro-steps", *(phase.value for phase in Phase), "off by")
        )
        print(f"\n{place.value}\n\n{report.table(shown, dict.fromkeys(columns, str))}")
    written = report.write("memory_plan", vars(arguments), rows)
    print(f"\nwritten to {written}")


def rows_of(stage: int, way: str, accumulation: int, ranks: int) -> list[dict[str, Any]]:
    """A row for each place: a cell for each phase, and by how much the plan is off where it
    counts."""
    found = compared(memory_config(stage, way, accumulation), ranks)
    rows = []
    for place in Place:
        cells, worst = {}, 0.0
        for phase in Phase:
            if (place, phase) not in found:  # DeepSpeed does not fall asleep
                cells[phase.value] = ""
                continue
            planned, measured = found[place, phase]
            is_large = max(planned, measured) > PARAMS // 10  # smaller: constants of a process
            off = 0.0 if planned == measured else planned / max(1, measured) - 1
            mark = " !" if abs(off) > TOLERANCE and is_large else ""
            cells[phase.value] = f"{planned / PARAMS:.3f} / {measured / PARAMS:.3f}{mark}"
            if is_large:
                worst = max(worst, off, key=abs)
        what = {
            "place": place.value,
            "stage": stage,
            "run": way,
            "ranks": ranks,
            "micro-steps": accumulation,
        }
        rows.append({**what, "off by": f"{100 * worst:+.1f} %", **cells})
    return rows


if __name__ == "__main__":
    main()
