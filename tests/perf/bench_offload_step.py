"""The offloaded optimizer step: ZeRO, ZeRO-Offload, upstream's ZenFlow and ours, in turn in one
run.

    python -m tests.perf.bench_offload_step [--millions 32] [--ranks 1] [--stage 2] [--turns 6]
    [--steps 8]
                                            [--device cpu|accelerator] [--device-ms MS ...]
                                            [--no-memory]

Each way to train has its own process (one a rank), so that its memory can be metered; they take
turns of a few steps. Where the CPU is the accelerator, the time that an accelerator would need is
SIMULATED by a sleep in forward and in backward: once longer than the worker's pass, once shorter
(see tests/perf/simulated_device.py for what that cannot show). Memory is the growth from a quarter
of the parameters to all of them, in separate processes: what a process takes at any size
(libraries, the worker's interpreter) is given apart.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import product
from typing import Any

from tests.perf import report, sides
from tests.perf.processes import Processes
from tests.perf.sides import Side
from tests.perf.stepping import (
    StepFigures,
    Workload,
    bytes_now,
    link_bytes,
    open_bench,
    steps,
    threads,
)

SIDES = (
    sides.ZERO,
    sides.OFFLOAD_DEEPSPEED,
    sides.OFFLOAD_TORCH,
    sides.UPSTREAM_SEQUENTIAL,
    sides.UPSTREAM_OVERLAPPED,
    sides.PREDICTIVE,
    sides.SELECTIVE_4_LAG,
    sides.PREDICTIVE_SLOW,
)
WARM_UP_STEPS = 28  # five intervals of 4 are synchronous, two more settle
LONGER, SHORTER = 2.0, 0.25
OURS = (sides.PREDICTIVE.name, sides.SELECTIVE_4_LAG.name)
RIVALS = (
    sides.OFFLOAD_DEEPSPEED.name,
    sides.OFFLOAD_TORCH.name,
    sides.UPSTREAM_SEQUENTIAL.name,
    sides.UPSTREAM_OVERLAPPED.name,
)
MEMORY = "memory of a rank and bytes over the link a step, by parameter of its partition"


class Contestant(Processes):
    """One way to train, in processes of its own."""

    def __init__(
        self, side: Side, workload: Workload, args: argparse.Namespace, warm_up: int = WARM_UP_STEPS
    ) -> None:
        self.side = side
        super().__init__(side.name, args.ranks, args.device)
        try:
            self.parameters: int = self.call(open_bench, side, workload, args.stage, args.threads)[
                0
            ]
            self.call(steps, warm_up, 0.0)
        except BaseException:
            self.close()
            raise

    def steps(self, count: int, device_seconds: float) -> list[StepFigures]:
        """Steps as the slowest rank has seen them."""
        return [
            max(ranks, key=lambda r: r.step)
            for ranks in zip(*self.call(steps, count, device_seconds), strict=True)
        ]


def memory(side: Side, args: argparse.Namespace) -> dict[str, float | None]:
    """Bytes a parameter of this rank's partition: between a quarter of the parameters and all of
    them."""
    points = []
    for millions in (args.millions / 4, args.millions):
        with closing(
            Contestant(side, Workload(millions=millions, rows=args.rows), args)
        ) as contestant:
            figures = contestant.call(bytes_now)[0]
            points.append((contestant.parameters / args.ranks, figures))
    (few, small), (many, large) = points
    slopes: dict[str, float | None] = {}
    for name, value in large.items():
        slopes[f"{name} B/parameter"] = (
            None if value is None else (value - small[name]) / (many - few)
        )
    host = slopes["host B/parameter"]
    assert host is not None
    slopes["host MiB at any size"] = (small["host"] - host * few) / 2**20
    return slopes


def timings(
    contestants: Sequence[Contestant], turns: int, count: int, device_seconds: float
) -> tuple[list[dict[str, Any]], list[report.Comparison]]:
    """Rows of the table for one length of the simulated device (0: nothing is simulated), and ours
    beside rivals."""
    taken: dict[str, list[StepFigures]] = {contestant.side.name: [] for contestant in contestants}
    by_name = {contestant.side.name: contestant for contestant in contestants}
    for turn, name in report.alternate(list(by_name), turns):
        figures = by_name[name].steps(count, device_seconds)
        if turn >= 0:
            taken[name] += figures
    rows = [
        step_row(by_name[name].side, figures, device_seconds) for name, figures in taken.items()
    ]
    medians = {
        name: [
            statistics.median(1e3 * f.step for f in figures[at : at + count])
            for at in range(0, len(figures), count)
        ]
        for name, figures in taken.items()
    }
    used = {name: contestant.call(threads)[0] for name, contestant in by_name.items()}
    simulation = (
        f"a sleep of {1e3 * device_seconds:.0f} ms a step is the device" if device_seconds else ""
    )
    return rows, compared("offloaded step", "median step of a turn, ms", medians, used, simulation)


def compared(
    what: str,
    quantity: str,
    values: dict[str, list[float]],
    used: dict[str, str],
    simulation: str = "",
) -> list[report.Comparison]:
    """`values` of ours beside those of each rival, by name; `used` are their threads."""
    return [
        report.compare(
            f"{what}, {name}",
            rival,
            quantity,
            values[name],
            values[rival],
            (used[name], used[rival]),
            simulation,
        )
        for name, rival in product(OURS, RIVALS)
        if name in values and rival in values
    ]


def step_row(side: Side, figures: Sequence[StepFigures], device_seconds: float) -> dict[str, Any]:
    """What the steps of one way to train took; milliseconds."""
    times = sorted(1e3 * f.step for f in figures)
    waits = [1e3 * f.wait for f in figures if f.wait is not None]
    workers = [1e3 * f.worker for f in figures if f.worker is not None]
    median, mean = statistics.median(times), statistics.fmean(times)
    row = {
        "variant": side.name,
        "interval": side.interval,
        "simulated device ms": 1e3 * device_seconds,
        "median ms": median,
        "mean ms": mean,
        "p95 ms": times[math.ceil(0.95 * len(times)) - 1],
        "max ms": times[-1],
        "max / median": times[-1] / median,
        "exposed ms": statistics.fmean(1e3 * f.exposed for f in figures),
        "steps": len(times),
    }
    if waits:
        row |= {"wait ms": statistics.fmean(waits), "wait share": sum(waits) / sum(times)}
    if workers:
        row["worker ms a step"] = statistics.median(workers) / side.interval
    return row


def checks(
    longer: Sequence[dict[str, Any]], shorter: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What must hold for the predictive rule, with the simulated device longer and shorter than the
    worker's pass.

    A shorter device makes the native worker the bottleneck only where something else does the
    elementwise work of an accelerator; a worker of torch operations is the bottleneck everywhere.
    """
    found = []

    def add(
        row: dict[str, Any], when: str, must: str, value: float, form: str, holds: bool
    ) -> None:
        text = format(value, form)
        found.append(
            {
                "variant": row["variant"],
                "when": when,
                "must": must,
                "reached": text,
                "passed": holds,
            }
        )

    fast, slow = (sides.PREDICTIVE.name,), sides.PREDICTIVE_SLOW.name
    for row in (row for row in longer if row["variant"] in fast):
        add(
            row,
            "device longer",
            "wait under 2% of the step",
            row["wait share"],
            ".2%",
            row["wait share"] < 0.02,
        )
        slowest = row["max / median"]
        add(row, "device longer", "no step over 1.3 medians", slowest, ".2f", slowest <= 1.3)
    for row in (row for row in shorter if row["variant"] in (*fast, slow)):
        bottleneck = max(row["worker ms a step"], row["mean ms"] - row["wait ms"])
        ratio = row["mean ms"] / bottleneck
        longest = (
            "worker's"
            if bottleneck == row["worker ms a step"]
            else "rest's, which is longer than the worker's"
        )
        must = f"mean step within 10% of the {longest}"
        add(row, "device shorter", must, ratio, ".2f", ratio <= 1.1)
    return found


def worker_seconds(contestants: Sequence[Contestant]) -> float:
    """The longest pass of a worker that steps each time; 0 if there is none."""
    passes = [
        statistics.median(f.worker or 0.0 for f in contestant.steps(8, 0.0))
        for contestant in contestants
        if contestant.side.extended and contestant.side.interval == 1 and contestant.side.native
    ]
    return max(passes, default=0.0)


def compare(
    contestants: Sequence[Contestant], args: argparse.Namespace
) -> dict[str, tuple[list[dict[str, Any]], list[report.Comparison]]]:
    """Rows and comparisons by title. A real accelerator's own time is taken as it is; the CPU's is
    made longer by sleeping."""
    if args.device == "accelerator":
        return {"accelerator": timings(contestants, args.turns, args.steps, 0.0)}
    lengths = {"SIMULATED device, given length": [ms / 1e3 for ms in args.device_ms or []]}
    if not args.device_ms:
        worker = worker_seconds(contestants)
        lengths = {
            "SIMULATED device, longer than the worker": [LONGER * worker],
            "SIMULATED device, shorter than the worker": [SHORTER * worker],
        }
    return {
        f"{title}: sleeps {1e3 * length:.0f} ms a step": timings(
            contestants, args.turns, args.steps, length
        )
        for title, seconds in lengths.items()
        for length in seconds
    }


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    names = [side.name for side in SIDES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=float, default=32, help="million parameters (default 32)"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument(
        "--rows", type=int, default=4, help="rows of the batch: the real work of a step (default 4)"
    )
    parser.add_argument(
        "--turns", type=int, default=6, help="turns that each way to train takes (default 6)"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps a turn (default 8)")
    parser.add_argument(
        "--threads",
        type=int,
        help="of the trainer (default: its cores, half where a worker has half)",
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument(
        "--device-ms", type=float, nargs="+", help="lengths of the simulated device's step"
    )
    parser.add_argument("--no-memory", action="store_true", help="no memory")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}"
    )
    return parser


def measure(
    args: argparse.Namespace,
) -> tuple[dict[str, list[dict[str, Any]]], list[report.Comparison]]:
    """All tables by title, and ours beside rivals."""
    chosen = [side for side in SIDES if side.name in args.only]
    memories: list[dict[str, Any]] = (
        [] if args.no_memory else [{"variant": side.name, **memory(side, args)} for side in chosen]
    )
    with ExitStack() as stack:
        contestants = []
        for side in chosen:
            contestant = Contestant(side, Workload(millions=args.millions, rows=args.rows), args)
            contestants.append(stack.enter_context(closing(contestant)))
        timed = compare(contestants, args)
        links = {
            contestant.side.name: contestant.call(link_bytes, 4)[0] for contestant in contestants
        }
        used = {contestant.side.name: contestant.call(threads)[0] for contestant in contestants}
        partition = contestants[0].parameters / args.ranks
    tables = {title: rows for title, (rows, _) in timed.items()}
    comparisons = [one for _, found in timed.values() for one in found]
    for row in memories:
        link = links[str(row["variant"])]
        if link is not None:
            row["link down B/parameter"], row["link up B/parameter"] = (
                moved / partition for moved in link
            )
    if memories:
        tables[MEMORY] = memories
        quantity = "host B/parameter"
        held = {row["variant"]: [row[quantity]] for row in memories}
        comparisons += compared("host memory of the optimizer", quantity, held, used)
    if args.device == "cpu" and not args.device_ms:
        longer, shorter = list(tables.values())[:2]
        tables["checks (SIMULATED device)"] = checks(longer, shorter)
    return tables, comparisons


def main() -> None:
    args = arguments().parse_args()
    tables, comparisons = measure(args)
    for title, rows in tables.items():
        names = dict.fromkeys(name for row in rows for name in row)
        print(f"\n{title}\n\n{report.table(rows, {name: show for name in names})}")
    rows = [{"table": title, **row} for title, rows in tables.items() for row in rows]
    print(f"\nwritten to {report.write('offload_step', vars(args), rows, comparisons)}")


def show(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "pass" if value else "FAIL"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
