"""All that a machine with an accelerator can measure, in parts that cannot harm each other: `make bench-gpu`.

    python -m tests.perf.suite [--parts startup step/1.5b ...] [--budget SECONDS] [--list] [--resume]
                               [--device accelerator|cpu --toy]

Each part is a benchmark of this folder in a process of its own with a time limit of its own. Whatever becomes of it,
the next one runs; when the budget is spent the rest is left out, and said so. A name picks a part and all below it
(``step/1.5b``). After every part, everything so far is in one file, ``gpu.json``: outcomes, the ends of their outputs
and the results that they wrote; it lies with their own files in ``outputs/bench``, or in the folder that the variable
OUT names. ``--resume`` leaves out what is done in that file. ``--toy`` runs every part at sizes of no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.perf import report
from tests.perf.bench_offload_step import ALONE_SIDES

NAME = "gpu"
SEQUENCES = {"0.5b": (512, 2048, 8192), "1.5b": (512, 2048, 8192), "3b": (512, 2048, 8192)}
LEAST_SECONDS = 20.0
SHOWN_LINES = 40
TIMES = ("median ms", "p95 ms", "max ms", "wait ms")
STEP_COLUMNS = ("variant", *TIMES, "idle share, no kernel", "device GiB", "host GiB")


@dataclass(frozen=True)
class Part:
    """A process of the suite.

    Attributes:
        module: of this folder.
        arguments, toy: its command line at real sizes and at toy sizes, without ``--device``.
        limit: seconds.
        result, toy_result: names of the files that it writes; rows of several parts may be in one.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    toy: tuple[str, ...]
    limit: float
    result: str = ""
    toy_result: str = ""

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether one of `names` is this part's or the beginning of it."""
        return any(self.name == name or self.name.startswith(f"{name}/") for name in names)


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them, the short ones first."""
    found = [
        Part("operators", "tools.build_operators", (), (), 300),
        Part("bandwidth", "tests.perf.bandwidth", ("--mib", "1024"), ("--mib", "4"), 120, "bandwidth", "bandwidth"),
    ]
    real: tuple[str, ...]
    toy: tuple[str, ...]
    for millions, ranks, limit in ((1000, 1, 240), (1000, 2, 300), (3000, 1, 300), (3000, 2, 400), (7000, 1, 500)):
        name = f"startup/{millions // 1000}b/{ranks}-rank"
        real = ("--millions", str(millions), "--ranks", str(ranks), "--repeats", "3")
        toy = ("--millions", "1", "--ranks", str(ranks), "--repeats", "1")
        found.append(
            Part(name, "tests.perf.bench_startup", real, toy, limit, f"startup_{millions}m_{ranks}ranks", "startup")
        )
    gather = ("--ranks", "2", "--dtype", "bfloat16")
    real = (*gather, "--sizes", "medium", "large", "huge", "--repeats", "5", "--steps", "3")
    toy = (*gather, "--sizes", "tiny", "--repeats", "1", "--steps", "1")
    found.append(Part("gather", "tests.perf.bench_gather", real, toy, 400, "gather", "gather"))
    found += _steps()
    real = ("--rows", "adamw", "predictive", "--seeds", "1", "--model", "100m", "--steps", "300", "--reuse")
    toy = ("--rows", "adamw", "--seeds", "1", "--quick", "--reuse")
    found.append(
        Part("convergence", "tests.perf.bench_convergence", real, toy, 540, "convergence_100m", "convergence_quick")
    )
    return found


def _steps() -> list[Part]:
    found = []
    for model, sequences in SEQUENCES.items():
        for sequence in sequences:
            for side in ALONE_SIDES:
                name = f"step/{model}/{sequence}/{slug(side.name)}"
                real: tuple[str, ...] = ("--model", model, "--sequence", str(sequence), "--only", side.name)
                real += ("--turns", "4", "--steps", "8")
                toy = ("--model", "toy", "--sequence", "32", "--only", side.name, "--turns", "1", "--steps", "4")
                result = f"offload_step_{model}_{sequence}"
                found.append(Part(name, "tests.perf.bench_offload_step", real, toy, 300, result, "offload_step_toy_32"))
    return found


@dataclass
class Outcome:
    """What became of a part: `state` is "done", "failed", "overran" or "left out"."""

    part: str
    state: str
    seconds: float = 0.0
    output: str = ""


def run(part: Part, device: str, toy: bool, limit: float) -> Outcome:
    """Run `part` for at most `limit` seconds; nothing that it has started is left afterwards."""
    arguments = list(part.toy if toy else part.arguments)
    if part.module.startswith("tests.perf."):
        arguments += ["--device", device]
    environment = os.environ | {"DS_SKIP_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    if device == "accelerator":
        environment.pop("DS_ACCELERATOR", None)
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", part.module, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        output, state = process.communicate(timeout=limit)[0], ""
    except subprocess.TimeoutExpired:
        state = "overran"
        output = ""
    finally:
        _end_group(process.pid)  # its ranks and their workers end with their parents, and this makes sure of it
    if state:
        output = process.communicate()[0]
    state = state or ("done" if process.returncode == 0 else "failed")
    return Outcome(part.name, state, time.monotonic() - begin, "\n".join(output.splitlines()[-SHOWN_LINES:]))


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


class Record:
    """Outcomes by part, in the file that they are kept in, together with the results of the parts that are done."""

    def __init__(self, resume: bool) -> None:
        self.path = report.path_of(NAME)
        self.outcomes: dict[str, Outcome] = {}
        if resume and self.path.exists():
            rows = json.loads(self.path.read_text())["rows"]
            self.outcomes = {row["part"]: Outcome(**row) for row in rows}

    def is_done(self, part: Part) -> bool:
        """Whether an earlier run has done it."""
        return part.name in self.outcomes and self.outcomes[part.name].state == "done"

    def add(self, outcome: Outcome, settings: dict[str, Any]) -> None:
        """Keep it, and write everything."""
        self.outcomes[outcome.part] = outcome
        toy = settings["toy"]
        names = {part.toy_result if toy else part.result for part in parts()} - {""}
        results = {name: _read(report.path_of(name)) for name in sorted(names) if report.path_of(name).exists()}
        report.write(NAME, settings | {"results": results}, [vars(o) for o in self.outcomes.values()])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:  # its part was ended while it wrote
        return None


def summary(outcomes: Sequence[Outcome], toy: bool) -> str:
    """The step tables of what was measured, and last, what became of each part."""
    blocks = []
    steps = [part for part in parts() if part.name.startswith("step/")]
    for name in dict.fromkeys(part.toy_result if toy else part.result for part in steps):
        kept = _read(report.path_of(name)) if report.path_of(name).exists() else None
        rows = kept["rows"] if kept else []
        if rows:
            zero = next((row["median ms"] for row in rows if row["variant"] == "ZeRO"), None)
            shown = [row | {"practicality": None if zero is None else zero / row["median ms"]} for row in rows]
            columns = {column: "" if column == "variant" else ".2f" for column in (*STEP_COLUMNS, "practicality")}
            blocks.append(f"{name}\n\n{report.table(shown, dict(columns))}")
    states = [{"part": o.part, "state": o.state, "seconds": o.seconds} for o in outcomes]
    blocks.append(report.table(states, {"part": "", "state": "", "seconds": ".0f"}))
    return "\n\n".join(blocks)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=[], help="names or beginnings of names (default: all)")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default 570; 0: no limit)")
    parser.add_argument("--list", action="store_true", help="only list the parts and their limits")
    parser.add_argument("--resume", action="store_true", help="leave out what gpu.json says is done")
    parser.add_argument("--toy", action="store_true", help="sizes of no meaning, to try the suite itself")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="accelerator")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part that was asked for is done."""
    args = arguments().parse_args(argv)
    unknown = [name for name in args.parts if not any(part.is_in([name]) for part in parts())]
    if unknown:
        print(f"error: no part is called {', '.join(unknown)}; --list lists them", file=sys.stderr)
        return 2
    chosen = [part for part in parts() if not args.parts or part.is_in(args.parts)]
    if args.list:
        print(report.table([vars(part) for part in chosen], {"name": "", "limit": ".0f"}))
        return 0
    if args.device == "accelerator" and not torch.accelerator.is_available():
        print(
            f"error: torch {torch.__version__} of {sys.executable} sees no accelerator, and these are measurements of "
            "one. Nothing was measured. (PYTHON=... names an interpreter with another torch; --device cpu --toy tries "
            "the suite itself)",
            file=sys.stderr,
        )
        return 1
    if args.device == "cpu" and not args.toy:
        print("error: real sizes are for an accelerator: add --toy to --device cpu", file=sys.stderr)
        return 1
    return measure(chosen, args)


def measure(chosen: Sequence[Part], args: argparse.Namespace) -> int:
    """Run the parts one after the other; 0 if all are done."""
    record, deadline = Record(args.resume), time.monotonic() + (args.budget or float("inf"))
    for part in chosen:
        if args.resume and record.is_done(part):
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            outcome = Outcome(part.name, "left out")
        else:
            print(f"{part.name} ...", flush=True)
            outcome = run(part, args.device, args.toy, min(part.limit, left))
            print(f"{outcome.output}\n{part.name}: {outcome.state}, {outcome.seconds:.0f} s\n", flush=True)
        record.add(outcome, vars(args))
    print(summary([record.outcomes[part.name] for part in chosen], args.toy))
    print(f"\nwritten to {record.path}")
    return int(any(not record.is_done(part) for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
