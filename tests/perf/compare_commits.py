"""The optimizer step, or the start, of this checkout beside that of an earlier commit, in one run.

    python -m tests.perf.compare_commits --before COMMIT [--rounds 150] [--steps 3]
    python -m tests.perf.compare_commits --before COMMIT --start-up --cpu-time [--rounds 20]

Each commit trains the same model in its own process with one thread. They take turns (A B A B): one
makes some steps while the other is idle. Many short rounds are better than few long ones: both
sides of a round then meet the same load and clock of the machine. With `--start-up`, each round
starts new processes and times `deepspeed.initialize` and the first step after it. The earlier
commit is checked out to a temporary folder. It uses this checkout's native kernel if the sources
are equal; otherwise its own is built first: without one it would compute in torch operations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("commit_process.py")
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "stage 2, predictive": (2, {"update_interval": 1, "full_warm_up_rounds": 1}),
    "stage 3, predictive": (3, {"update_interval": 1, "full_warm_up_rounds": 1}),
    "stage 3, exact": (3, {"update_rule": "exact", "full_warm_up_rounds": 1}),
    "stage 2, selective": (2, {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}),
}
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
"""So that glibc keeps what is freed. Otherwise it returns DeepSpeed's temporaries of a step to the
system or not, depending on what lies above them, and a step of 9 ms takes 14 in one process and not
in another."""
START_ROWS = ("initialize", "initialize and the first step")


class Contestant:
    """One checkout that trains in a process of its own."""

    def __init__(self, tree: Path, way: str, args: argparse.Namespace) -> None:
        stage, zenflow = WAYS[way]
        order = json.dumps(
            {
                "stage": stage,
                "zenflow": zenflow,
                "millions": args.millions,
                "clock": _clock(args),
            },
        )
        environment = {**os.environ, **KEEPS_MEMORY, "PYTHONPATH": str(tree)}
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), order],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.milliseconds: list[float] = []
        assert self.process.stdout is not None
        self.start_milliseconds = float(self.process.stdout.readline())

    def run(self, steps: int, keep: bool = True) -> None:
        """Let it make some steps; their milliseconds are kept unless told otherwise."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        self.milliseconds += found if keep else []

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A temporary work tree of `commit`."""
    folder = Path(tempfile.mkdtemp(prefix="deepspeed_ext-commit-")) / "tree"
    try:
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(folder), commit],
            cwd=ROOT,
            check=True,
        )
        kernel = Path("deepspeed_ext/zenflow/worker/kernel")
        sources = [path.name for path in (ROOT / kernel).iterdir() if path.suffix in (".cpp", ".h")]
        if all(
            ((ROOT / kernel / name).read_bytes() == _bytes(folder / kernel / name))
            for name in sources
        ):
            for library in (ROOT / kernel).glob("*.so"):
                shutil.copy(library, folder / kernel)
        else:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            subprocess.run(build, cwd=folder, check=True, stdout=sys.stderr)
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=False)
        shutil.rmtree(folder.parent, ignore_errors=True)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _clock(args: argparse.Namespace) -> str:
    if args.calls:
        return "calls"
    return ("all" if args.start_up else "thread") if args.cpu_time else "wall"


def start(tree: Path, way: str, args: argparse.Namespace) -> list[float]:
    """Milliseconds of `initialize`, and of it with the first step, in a new process."""
    side = Contestant(tree, way, args)
    try:
        side.run(1)
    finally:
        side.close()
    return [side.start_milliseconds, side.start_milliseconds + side.milliseconds[0]]


def compare_starts(
    before: Path, way: str, args: argparse.Namespace
) -> list[tuple[float, float, list[float]]]:
    """As `compare`, of `initialize`, and of it with the first step."""
    trees = (before, ROOT)
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    for tree in trees:
        start(tree, way, args)  # what a first run compiles or caches
    for number in range(args.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            found[side].append(start(trees[side], way, args))
    rows = []
    for part in (0, 1):
        first, second = ([each[part] for each in side] for side in found)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        rows.append((statistics.median(first), statistics.median(second), ratios))
    return rows


def compare(before: Path, way: str, args: argparse.Namespace) -> tuple[float, float, list[float]]:
    """Median milliseconds per step before and now, and the ratio now / before of each round's
    medians."""
    ratios = []
    with ExitStack() as stack:
        sides = [Contestant(tree, way, args) for tree in (before, ROOT)]
        for side in sides:
            stack.callback(side.close)
        for side in sides:
            side.run(args.warm_up, keep=False)
        for number in range(args.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.run(args.steps)
            latest = [statistics.median(side.milliseconds[-args.steps :]) for side in sides]
            ratios.append(latest[1] / latest[0])
    first, second = (statistics.median(side.milliseconds) for side in sides)
    return first, second, ratios


def interval(ratios: list[float]) -> tuple[float, float]:
    """The order statistics that hold the median of a continuous distribution 95 times in 100."""
    ordered, middle = sorted(ratios), len(ratios) / 2
    reach = 0.98 * len(ratios) ** 0.5
    return (
        ordered[max(0, math.floor(middle - reach))],
        ordered[min(len(ratios) - 1, math.ceil(middle + reach) - 1)],
    )


def print_row(what: str, first: float, second: float, ratios: list[float]) -> None:
    """A row of the table."""
    spread = "{:.3f} to {:.3f}".format(*interval(ratios))
    print(
        f"| {what} | {first:.1f} | {second:.1f} | {statistics.median(ratios):.3f} | {spread} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=3, help="per round and side")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before the first round")
    parser.add_argument("--millions", type=float, default=8.0, help="million parameters")
    parser.add_argument("--start-up", action="store_true", help="time the start instead of steps")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time, which other work hardly changes: that of the training thread, or with "
        "--start-up that of all processes",
    )
    parser.add_argument(
        "--calls",
        action="store_true",
        help="calls of Python functions in the training thread instead of milliseconds: nothing "
        "else on the machine changes them",
    )
    parser.add_argument("--only", choices=WAYS, help="one configuration")
    args = parser.parse_args()
    unit = "calls" if args.calls else "ms"
    print(
        f"| configuration | before, {unit} | now, {unit} | now / before, "
        "median of rounds | 95 % interval of the median |"
    )
    print("| --- | --- | --- | --- | --- |")
    with checkout(args.before) as before:
        for way in WAYS if not args.only else [args.only]:
            if args.start_up:
                for what, row in zip(START_ROWS, compare_starts(before, way, args), strict=True):
                    print_row(f"{way}: {what}", *row)
            else:
                print_row(way, *compare(before, way, args))


if __name__ == "__main__":
    main()
