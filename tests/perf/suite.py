"""All that a machine can measure, in parts that cannot harm each other: `make bench`, `make
bench-gpu`.

    python -m tests.perf.suite [--on gpu|cpu] [--parts 7b step/1.5b ...] [--budget SECONDS] [--list]
                               [--again] [--device accelerator|cpu] [--toy]

Each part is a benchmark in a process of its own with a time limit of its own. Whatever becomes of
it, the next one runs. A part that the budget has no room for is left out; the end says which. A
name picks a part and all below it (``step/1.5b``). ``--list`` shows all of that without running
anything. After every part, everything so far is in
one file: outcomes, the ends of outputs and the results, also those of a part that failed or ran out
of time half-way; what the file held of other parts stays. It is ``gpu.json`` or ``cpu.json`` beside
the parts' own files, in ``outputs/bench`` or in the folder that the variable OUT names. What is
done in that file at this commit is left out, so that the next call goes on; ``--again`` repeats it.
``--toy`` runs every part at sizes of no meaning.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.perf import cpu_parts, gpu_parts, report
from tests.perf.part import LOOK_SECONDS, Outcome, Part, Running

LEAST_SECONDS = 20.0
PARTS = {"gpu": gpu_parts.parts, "cpu": cpu_parts.parts}
LIST_COLUMNS = {"name": "", "usual": ".0f", "limit": ".0f", "runs": "", "covers": ""}


class Record:
    """Outcomes by part and results by name, in the file that they are kept in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        self.results: dict[str, Any] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.outcomes = {row["part"]: Outcome(**row) for row in kept["rows"]}
            self.results = kept["settings"]["results"]

    def is_done(self, part: Part, commit: str) -> bool:
        """Whether this run or an earlier one of the same commit has done it."""
        outcome = self.outcomes.get(part.name)
        return outcome is not None and (outcome.state, outcome.commit) == ("done", commit)

    def add(
        self, outcome: Outcome, result: str, settings: dict[str, Any], newer_than: float
    ) -> None:
        """Keep it with the result that its part has written since `newer_than`, and write
        everything."""
        self.outcomes[outcome.part] = outcome
        self.take(result, newer_than)
        kept = {
            "provenance": report.provenance(),
            "settings": settings | {"results": self.results},
            "rows": [vars(outcome) for outcome in self.outcomes.values()],
        }
        report.replace(self.path, json.dumps(kept, indent=1) + "\n")

    def take(self, result: str, newer_than: float) -> None:
        """Take over what a part has written since `newer_than`, whatever became of the part."""
        path = report.path_of(result)
        if result and path.exists() and path.stat().st_mtime >= newer_than:
            self.results[result] = _read(path)

    def take_over(self, parts: Sequence[Part], toy: bool) -> None:
        """Take over what parts have written after the file: the run that they were in has been
        killed."""
        kept_at = self.path.stat().st_mtime if self.path.exists() else 0.0
        for part in parts:
            self.take(part.result_of(toy), kept_at)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:  # its part was ended while it wrote
        return None


def record_of(args: argparse.Namespace) -> Record:
    """Where a run with these arguments keeps what it measures."""
    return Record(report.path_of(args.on))


def summary(record: Record, chosen: Sequence[Part], toy: bool) -> str:
    """The step tables of an accelerator, and last, what became of each part, in Markdown."""
    names = dict.fromkeys(part.result_of(toy) for part in chosen)
    results = {name: record.results[name] for name in names if record.results.get(name)}
    outcomes = [record.outcomes[part.name] for part in chosen]
    states = [
        {
            "part": o.part,
            "state": o.state,
            "seconds": o.seconds,
            "why": o.output if o.state == "left out" else "",
        }
        for o in outcomes
    ]
    blocks = gpu_parts.step_tables(results)
    return "\n\n".join(
        filter(
            None,
            [*blocks, report.table(states, {"part": "", "state": "", "seconds": ".0f", "why": ""})],
        )
    )


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--on", choices=tuple(PARTS), default="gpu", help="what to run (gpu: measure one)"
    )
    parser.add_argument(
        "--parts", nargs="*", default=[], help="names or beginnings of names (default: all)"
    )
    parser.add_argument(
        "--budget", type=float, default=0, help="seconds for this call (default: no limit)"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the parts and what would run"
    )
    parser.add_argument("--again", action="store_true", help="also run what is done at this commit")
    parser.add_argument(
        "--toy", action="store_true", help="sizes of no meaning, to try the suite itself"
    )
    parser.add_argument(
        "--device", choices=("cpu", "accelerator"), help="of --on gpu (default accelerator)"
    )
    return parser


def _ended(*signal_and_frame: Any) -> None:
    sys.exit("error: the suite was ended; what is measured is kept, and the same command goes on")


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part that was asked for is done."""
    args = arguments().parse_args(argv)
    args.device = args.device or ("cpu" if args.on == "cpu" else "accelerator")
    parts = PARTS[args.on]()
    unknown = [name for name in args.parts if not any(part.is_in([name]) for part in parts)]
    if unknown:
        print(f"error: no part is called {', '.join(unknown)}; --list lists them", file=sys.stderr)
        return 2
    chosen = [part for part in parts if not args.parts or part.is_in(args.parts)]
    if args.list:
        print(listing(chosen, args))
        return 0
    if args.device == "accelerator" and not torch.accelerator.is_available():
        print(
            f"error: torch {torch.__version__} of {sys.executable} sees no accelerator, and these "
            "are measurements of one. Nothing was measured. (PYTHON=... names an interpreter with "
            "another torch; --device cpu --toy tries the suite itself)",
            file=sys.stderr,
        )
        return 1
    if args.on == "gpu" and args.device == "cpu" and not args.toy:
        print(
            "error: real sizes are for an accelerator: add --toy to --device cpu", file=sys.stderr
        )
        return 1
    signal.signal(signal.SIGTERM, _ended)  # so that the part that runs ends as well
    return measure(chosen, args)


def why_not(part: Part, left: float, args: argparse.Namespace) -> str:
    """Why a part is not begun with `left` seconds to go; "" if it is."""
    needed = LEAST_SECONDS if args.toy else max(part.usual, LEAST_SECONDS)
    return (
        ""
        if left >= needed
        else f"takes about {needed:.0f} s, and {max(0, left):.0f} are left of the budget"
    )


def listing(chosen: Sequence[Part], args: argparse.Namespace) -> str:
    """The parts with their seconds, and which of them a run of this budget would begin."""
    begun, rows = list[Part](), list[dict[str, Any]]()
    for part in chosen:
        spent = sum(each.usual for each in begun)
        reason = why_not(part, (args.budget or float("inf")) - spent, args)
        begun += [] if reason else [part]
        rows.append(vars(part) | {"runs": f"no: {reason}" if reason else "yes"})
    return (
        f"{report.table(rows, LIST_COLUMNS)}\n\n{len(begun)} of {len(rows)} parts, about "
        f"{sum(part.usual for part in begun):.0f} s"
    )


def measure(chosen: Sequence[Part], args: argparse.Namespace) -> int:
    """Run the parts in their order; 0 if all are done."""
    record, commit = record_of(args), report.commit()
    deadline = time.monotonic() + (args.budget or float("inf"))
    record.take_over(chosen, args.toy)
    ahead = [part for part in chosen if args.again or not record.is_done(part, commit)]
    if kept := [part.name for part in chosen if part not in ahead]:
        print(f"done at this commit, and kept (--again repeats): {', '.join(kept)}\n", flush=True)
    for number, part in enumerate(ahead, start=1):
        left, begin = deadline - time.monotonic(), time.time()
        if reason := why_not(part, left, args):
            print(f"{part.name}: left out: {reason}\n", flush=True)
            outcome, result = Outcome(part.name, "left out", output=reason), ""
        else:
            to_go = _to_go(ahead[number - 1 :], args.toy)
            print(f"[{number}/{len(ahead)}] {part.name} ...{to_go}", flush=True)
            outcome, result = run(part, left, args), part.result_of(args.toy)
        outcome.commit = commit
        record.add(outcome, result, vars(args), begin)
    print(report.for_terminal(summary(record, chosen, args.toy)))
    print(f"\nwritten to {record.path}")
    return int(any(not record.is_done(part, commit) for part in chosen))


def run(part: Part, left: float, args: argparse.Namespace) -> Outcome:
    """Run a part for at most `left` seconds, and say what became of it."""
    running = Running(part, args.device, args.toy, min(part.limit, left))
    try:
        while (outcome := running.outcome()) is None:
            time.sleep(LOOK_SECONDS)
    except BaseException:
        running.end()
        raise
    if outcome.state == "overran" and left < part.limit:
        outcome.state = "left out"  # the budget ended it, not its own limit
    output = report.for_terminal(outcome.output)
    print(f"{output}\n{part.name}: {outcome.state}, {outcome.seconds:.0f} s\n", flush=True)
    if args.on == "cpu" and not outcome.is_bad:
        outcome.output = ""  # its results say the same, and the file is committed
    return outcome


def _to_go(ahead: Sequence[Part], toy: bool) -> str:
    if toy or not all(part.usual for part in ahead):
        return ""
    minutes = sum(part.usual for part in ahead) / 60
    return (
        f" (usually {ahead[0].usual:.0f} s, at most {ahead[0].limit:.0f}; "
        f"about {minutes:.0f} min to go)"
    )


if __name__ == "__main__":
    sys.exit(main())
