"""The command line of the numerics study; see the package's docstring."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from studies import numerics
from studies.numerics import plots, table
from studies.numerics.other_tasks import MissingPackageError
from studies.numerics.rows import GROUPS, NoRateError, Row, end_loss, planned, store, stored
from studies.numerics.rules import UPSTREAM
from studies.numerics.training import Progress, Training
from tests.perf import report

GROUP_NAMES = ["rates", *(group.name for group in GROUPS)]


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=numerics.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        nargs="*",
        choices=GROUP_NAMES,
        metavar="GROUP",
        help="train the missing rows of these groups (none named: "
        f"of all): {', '.join(GROUP_NAMES)}",
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="only rows of these tasks")
    parser.add_argument(
        "--rules", nargs="+", default=[], help="only rows of these rules, and AdamW"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[],
        help="only rows of these seeds, and learning rates",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after this time; a row that was begun is continued by the next run",
    )
    parser.add_argument(
        "--again", action="store_true", help="train rows again that have a file (default: reuse it)"
    )
    parser.add_argument(
        "--list", action="store_true", help="the groups, and how many rows of each are there"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print all rows; write the tables of docs/results/numerics.md",
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw the figures beside it (needs matplotlib)"
    )
    return parser  # fmt: skip


def chosen(args: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for, in order of importance."""
    found = []
    for group, row in planned():
        is_asked = not args.rows or group in args.rows
        is_asked &= not args.tasks or row.task in args.tasks
        is_asked &= not args.rules or row.rule in (*args.rules, "adamw")
        is_asked &= not args.seeds or group == "rates" or row.seed in args.seeds
        if is_asked:
            found.append(row)
    return found


def _unfinished(row: Row) -> Path:
    return report.path_of(f"numerics/{row.name}").with_suffix(".pt")


def run(row: Row, deadline: float = math.inf) -> bool:
    """Train a row until it is done, or until `deadline` of `time.monotonic`; whether it is done."""
    if row.rule in UPSTREAM:
        from studies.numerics.through_deepspeed import upstream_result

        store(row, upstream_result(row))
        return True
    path = _unfinished(row)
    progress: Progress | None = torch.load(path, weights_only=False) if path.exists() else None
    training = Training(row, progress)
    training.run(deadline)
    if not training.is_done:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(training.progress, path)
        return False
    store(row, training.result())
    path.unlink(missing_ok=True)
    return True


def train(rows: Sequence[Row], minutes: float, again: bool) -> bool:
    """Train `rows` one after the other; whether all that could be are done."""
    deadline = time.monotonic() + 60 * minutes
    for row in rows:
        if stored(row) is not None and not again:
            continue
        if time.monotonic() >= deadline:
            return False
        try:
            is_done = run(row, deadline)
        except (MissingPackageError, NoRateError) as error:
            print(f"{row.name}: left out: {error}", flush=True)
            continue
        if not is_done:
            print(f"{row.name}: to be continued", flush=True)
            return False
        result = stored(row)
        assert result is not None
        loss = end_loss(result)
        print(
            f"{row.name}: {'diverged' if loss is None else format(loss, '.4f')}, held out "
            f"{result['held_out']}, {(result['seconds'] or [0])[-1]:.0f} s (load "
            f"{os.getloadavg()[0]:.1f})",
            flush=True,
        )
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 75 if time ran out and another run would go on."""
    args = arguments().parse_args(argv)
    torch.set_num_threads(1)
    is_done = args.rows is None or train(chosen(args), args.minutes, args.again)
    if args.list:
        print(table.progress())
    if args.table:
        print(table.rows_table())
        print(f"written to {table.write()}")
    if args.plot:
        print("\n".join(f"drawn to {path}" for path in plots.draw()))
    return 0 if is_done else 75


if __name__ == "__main__":
    sys.exit(main())
