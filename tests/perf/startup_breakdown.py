"""Where the seconds of a start go, from `import torch` to the end of the first step: ours and
upstream's.

    python -m tests.perf.startup_breakdown [--millions 32] [--ranks 2] [--repeats 3] [--only VARIANT
    ...]

Every start has processes of its own, as a training script has; the variants take turns. A phase is
counted without the phases inside of it, and of the rank that took longest in all. Compiled
operators lie ready, as after a first start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.perf import report, sides
from tests.perf.sides import Side
from tests.perf.startup_process import OUTSIDE, PHASES

TIMEOUT_SECONDS = 180.0
RIVALS = {
    "ours: ZeRO-2, tier accelerator": "upstream: ZeRO-2",
    "ours: ZeRO-2, tier distributed": "upstream: ZeRO-2",
    "ours: ZeRO-2, tier host": "upstream: ZeRO-2",
    "ours: ZeRO-Offload": "upstream: ZeRO-Offload",
    "ours: ZenFlow, predictive": "upstream: ZenFlow, overlapped",
}
VARIANTS = tuple(dict.fromkeys(name for ours, theirs in RIVALS.items() for name in (theirs, ours)))


def variants() -> dict[str, tuple[Side, dict[str, Any]]]:
    """How each trains, and its further fields of ``zero_optimization``."""
    plain = {
        f"ours: ZeRO-2, tier {tier}": {"flatten_tier": tier}
        for tier in ("accelerator", "distributed", "host")
    }
    return {
        "upstream: ZeRO-2": (sides.ZERO, {}),
        **{name: (replace(sides.ZERO, extended=True), fields) for name, fields in plain.items()},
        "upstream: ZeRO-Offload": (sides.OFFLOAD_DEEPSPEED, {}),
        "ours: ZeRO-Offload": (replace(sides.OFFLOAD_DEEPSPEED, extended=True), {}),
        "upstream: ZenFlow, overlapped": (sides.UPSTREAM_OVERLAPPED, {}),
        "ours: ZenFlow, predictive": (sides.PREDICTIVE_1, {}),
    }


def one_start(variant: str, ranks: int, millions: float) -> dict[str, float]:
    """Seconds by phase of the slowest rank.

    Raises:
        RuntimeError: a rank failed or did not end.
    """
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "DSEXT_LOG_LEVEL": "WARNING",
    }
    environment.pop("LOCAL_SIZE", None)  # DeepSpeed would leave buffers in /dev/shm
    with tempfile.TemporaryDirectory(prefix="dsext-start-") as folder:
        command = [sys.executable, "-m", "tests.perf.startup_process", variant]
        log = Path(folder, "log")
        with log.open("wb") as output:
            processes = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), str(millions), folder],
                    cwd=report.ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(ranks)
            ]
            try:
                statuses = [process.wait(TIMEOUT_SECONDS) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        if any(statuses):
            raise RuntimeError(
                f"{variant}: ranks ended with {statuses}\n{log.read_text(errors='replace')[-3000:]}"
            )
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return max(found, key=lambda seconds: sum(seconds.values()))


def total(seconds: dict[str, float]) -> float:
    """All of a start."""
    return sum(seconds.values())


def within(seconds: dict[str, float]) -> float:
    """What comes after `init_distributed`: `initialize` and the first step, without the loading of
    operators."""
    return sum(taken for phase, taken in seconds.items() if phase not in (*OUTSIDE, "operators"))


def rows_of(turns: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row a phase, with a cell for each variant, and the sum."""
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        rows.append({"seconds of": phase})
        for variant, starts in turns.items():
            known = [seconds[phase] for seconds in starts if phase in seconds]
            rows[-1][variant] = report.summary(known) if known else None
    rows.append(
        {
            "seconds of": "all",
            **{name: report.summary(list(map(total, of))) for name, of in turns.items()},
        }
    )
    return rows


def comparisons_of(turns: dict[str, list[dict[str, float]]]) -> list[report.Comparison]:
    """Ours beside upstream's start with the same optimizer."""
    quantities = {
        "seconds of a start": total,
        "seconds of initialize and first step, without operators": within,
    }
    return [
        report.compare(
            f"start of {ours.removeprefix('ours: ')}",
            rival,
            quantity,
            list(map(of, turns[ours])),
            list(map(of, turns[rival])),
            ("1", "1"),
        )
        for ours, rival in RIVALS.items()
        if ours in turns and rival in turns
        for quantity, of in quantities.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=float, default=32, help="million parameters (default 32)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    args = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {variant: [] for variant in args.only}
    for _, variant in report.alternate(args.only, args.repeats, warm_up=0):
        turns[variant].append(one_start(variant, args.ranks, args.millions))
        print(f"{variant}: {total(turns[variant][-1]):.1f} s", flush=True)
    rows = rows_of(turns)
    print("\n" + report.table(rows, dict.fromkeys(rows[0], report.shown)))
    print(
        f"\nwritten to {report.write('startup_breakdown', vars(args), rows, comparisons_of(turns))}"
    )


if __name__ == "__main__":
    main()
