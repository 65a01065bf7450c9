"""What ``deepspeed-ext plan --memory`` says, beside what runs on the simulated accelerator hold. A simulation.

    python -m tests.perf.memory_plan [--ranks 2] [--accumulation 1 2]

Bytes per parameter of the model, planned / measured, of the rank that holds the most. The selective rule runs on one
rank: on several, ranks differ in how many blocks are hot, which a plan cannot know.
"""

from __future__ import annotations

import argparse
from itertools import product

from deepspeed_ext.memory.parts import Phase, Place
from tests.support.memory_runs import PARAMS, WAYS, compared, memory_config
from tests.support.ranks import close_pools

TOLERANCE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    print(f"{PARAMS:,} parameters; planned / measured bytes per parameter")
    for place in Place:
        print(f"\n{place.value}\n")
        print("| stage | run | ranks | micro-steps | " + " | ".join(phase.value for phase in Phase) + " | off by |")
        print("| --- | --- | --- | --- | " + " | ".join("---" for _ in Phase) + " | --- |")
        for stage, way, accumulation in product(arguments.stages, arguments.ways, arguments.accumulation):
            _print_row(stage, way, accumulation, 1 if "selective" in way else arguments.ranks, place)
    close_pools()


_found: dict[tuple[int, str, int, int], dict[tuple[Place, Phase], tuple[int, int]]] = {}


def _print_row(stage: int, way: str, accumulation: int, ranks: int, place: Place) -> None:
    key = (stage, way, accumulation, ranks)
    if key not in _found:
        _found[key] = compared(memory_config(stage, way, accumulation), ranks)
    cells, worst = [], 0.0
    for phase in Phase:
        planned, measured = _found[key][place, phase]
        off = 0.0 if planned == measured else planned / max(1, measured) - 1
        if max(planned, measured) > PARAMS // 10:  # smaller: constants of a process
            worst = max(worst, off, key=abs)
        mark = " !" if abs(off) > TOLERANCE and max(planned, measured) > PARAMS // 10 else ""
        cells.append(f"{planned / PARAMS:.3f} / {measured / PARAMS:.3f}{mark}")
    print(
        f"| {stage} | {way} | {ranks} | {accumulation} | " + " | ".join(cells) + f" | {100 * worst:+.1f} % |",
        flush=True,
    )


if __name__ == "__main__":
    main()
