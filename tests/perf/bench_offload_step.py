"""The offloaded optimizer step: ZeRO, ZeRO-Offload, upstream's ZenFlow and ours, in turn in one run.

    python -m tests.perf.bench_offload_step [--millions 32] [--ranks 1] [--stage 2] [--turns 6] [--steps 8]
                                            [--device cpu|accelerator] [--device-ms MS ...] [--no-memory]
    python -m tests.perf.bench_offload_step --model 1.5b [--batches 1x2048 4x8192] [--only NAME ...]
                                            [--device accelerator]

Each way to train has its own process (one a rank), so that its memory can be metered; they take turns of a few steps.
Where the CPU is the accelerator, the time that an accelerator would need is SIMULATED by a sleep in forward and in
backward: once longer than the worker's pass, once shorter (see tests/perf/simulated_device.py for what that cannot
show). Memory is the growth from a quarter of the parameters to all of them, in separate processes: what a process
takes at any size (libraries, the worker's interpreter) is given apart.

With ``--model`` a Llama is trained instead of a stack of linear layers, on batches of several sizes, and nothing is
simulated. Its optimizers do not fit beside each other, so the ways to train run one after the other, each in turn with
nobody; every row is kept as soon as it is measured, in a file that later runs of other ways add to. Its steps are those
of a training loop: each reads its loss, and nothing else waits for the accelerator before the last has ended.
Practicality is ZeRO's median step over the row's, of the same batch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import product
from typing import Any

from tests.perf import report, sides
from tests.perf.language_model import SHAPES
from tests.perf.sides import Side
from tests.perf.stepping import (
    Batch,
    StepFigures,
    Workload,
    bytes_now,
    link_bytes,
    open_bench,
    plain_steps,
    steps,
    threads,
    use_of_device,
)
from tests.support.ranks import RankPool

SIDES = (
    sides.ZERO,
    sides.OFFLOAD_DEEPSPEED,
    sides.OFFLOAD_TORCH,
    sides.UPSTREAM_SEQUENTIAL,
    sides.UPSTREAM_OVERLAPPED,
    sides.PREDICTIVE_1,
    sides.PREDICTIVE_4,
    sides.SELECTIVE_4_LAG,
    sides.PREDICTIVE_1_SLOW,
)
ALONE_SIDES = (
    sides.ZERO,
    sides.OFFLOAD_DEEPSPEED,
    sides.UPSTREAM_SEQUENTIAL,
    sides.UPSTREAM_OVERLAPPED,
    sides.PREDICTIVE_1,
    sides.PREDICTIVE_1_CORES,
    sides.PREDICTIVE_1_BFLOAT16,
    sides.PREDICTIVE_1_INT8,
    sides.PREDICTIVE_4,
    sides.SELECTIVE_4_LAG,
)
"""What a Llama is trained with."""
WARM_UP_STEPS = 28  # five intervals of 4 are synchronous, two more settle
FEWEST_STEPS = 2
"""Before a measurement on a new batch, for which memory is allocated anew, and under the profiler; at least an interval
each."""
TIMEOUT_SECONDS = 1200.0
LONGER, SHORTER = 2.0, 0.25
WAYS = ("down", "up")
OURS = (sides.PREDICTIVE_1.name, sides.PREDICTIVE_4.name, sides.SELECTIVE_4_LAG.name)
RIVALS = (
    sides.OFFLOAD_DEEPSPEED.name,
    sides.OFFLOAD_TORCH.name,
    sides.UPSTREAM_SEQUENTIAL.name,
    sides.UPSTREAM_OVERLAPPED.name,
)
MEMORY = "memory of a rank and bytes over the link a step, by parameter of its partition"


class Contestant:
    """One way to train, in processes of its own."""

    def __init__(self, side: Side, workload: Workload, args: argparse.Namespace, warm_up: int = WARM_UP_STEPS) -> None:
        self.side = side
        self._pool = RankPool(args.ranks, args.device)
        try:
            self.parameters: int = self.call(open_bench, side, workload, args.stage, args.threads)[0]
            self.call(steps, warm_up, 0.0)
        except BaseException:
            self.close()
            raise

    def call(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """What `body` returns on each rank.

        Raises:
            RuntimeError: it failed on one of them.
        """
        outcomes = self._pool.run(body, args, {}, TIMEOUT_SECONDS)
        for outcome in outcomes:
            if outcome.error or outcome.exit_code is not None:
                raise RuntimeError(f"{self.side.name}: {outcome.error or f'ended with {outcome.exit_code}'}")
        return [outcome.value for outcome in outcomes]

    def steps(self, count: int, device_seconds: float) -> list[StepFigures]:
        """Steps as the slowest rank has seen them."""
        return [
            max(ranks, key=lambda r: r.step) for ranks in zip(*self.call(steps, count, device_seconds), strict=True)
        ]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def memory(side: Side, args: argparse.Namespace) -> dict[str, float | None]:
    """Bytes a parameter of this rank's partition: between a quarter of the parameters and all of them."""
    points = []
    for millions in (args.millions / 4, args.millions):
        with closing(Contestant(side, Workload(millions=millions, rows=args.rows), args)) as contestant:
            figures = contestant.call(bytes_now)[0]
            points.append((contestant.parameters / args.ranks, figures))
    (few, small), (many, large) = points
    slopes: dict[str, float | None] = {}
    for name, value in large.items():
        slopes[f"{name} B/parameter"] = None if value is None else (value - small[name]) / (many - few)
    host = slopes["host B/parameter"]
    assert host is not None
    slopes["host MiB at any size"] = (small["host"] - host * few) / 2**20
    return slopes


def timings(
    contestants: Sequence[Contestant], turns: int, count: int, device_seconds: float
) -> tuple[list[dict[str, Any]], list[report.Comparison]]:
    """Rows of the table for one length of the simulated device (0: nothing is simulated), and ours beside rivals."""
    taken: dict[str, list[StepFigures]] = {contestant.side.name: [] for contestant in contestants}
    by_name = {contestant.side.name: contestant for contestant in contestants}
    for turn, name in report.alternate(list(by_name), turns):
        figures = by_name[name].steps(count, device_seconds)
        if turn >= 0:
            taken[name] += figures
    rows = [step_row(by_name[name].side, figures, device_seconds) for name, figures in taken.items()]
    medians = {
        name: [
            statistics.median(1e3 * f.step for f in figures[at : at + count]) for at in range(0, len(figures), count)
        ]
        for name, figures in taken.items()
    }
    used = {name: contestant.call(threads)[0] for name, contestant in by_name.items()}
    simulation = f"a sleep of {1e3 * device_seconds:.0f} ms a step is the device" if device_seconds else ""
    return rows, compared("offloaded step", "median step of a turn, ms", medians, used, simulation)


def compared(
    what: str, quantity: str, values: dict[str, list[float]], used: dict[str, str], simulation: str = ""
) -> list[report.Comparison]:
    """`values` of ours beside those of each rival, by name; `used` are their threads."""
    return [
        report.compare(
            f"{what}, {name}", rival, quantity, values[name], values[rival], (used[name], used[rival]), simulation
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


def checks(longer: Sequence[dict[str, Any]], shorter: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold for the predictive rule, with the simulated device longer and shorter than the worker's pass.

    A shorter device makes the native worker the bottleneck only where something else does the elementwise work of an
    accelerator; a worker of torch operations is the bottleneck everywhere.
    """
    found = []

    def add(row: dict[str, Any], when: str, must: str, value: float, form: str, holds: bool) -> None:
        text = format(value, form)
        found.append({"variant": row["variant"], "when": when, "must": must, "reached": text, "passed": holds})

    fast, slow = (sides.PREDICTIVE_1.name, sides.PREDICTIVE_4.name), sides.PREDICTIVE_1_SLOW.name
    for row in (row for row in longer if row["variant"] in fast):
        add(row, "device longer", "wait under 2% of the step", row["wait share"], ".2%", row["wait share"] < 0.02)
        slowest = row["max / median"]
        add(row, "device longer", "no step over 1.3 medians", slowest, ".2f", slowest <= 1.3)
    for row in (row for row in shorter if row["variant"] in (*fast, slow)):
        bottleneck = max(row["worker ms a step"], row["mean ms"] - row["wait ms"])
        ratio = row["mean ms"] / bottleneck
        longest = "worker's" if bottleneck == row["worker ms a step"] else "rest's, which is longer than the worker's"
        must = f"mean step within 10% of the {longest}"
        add(row, "device shorter", must, ratio, ".2f", ratio <= 1.1)
    return found


def worker_seconds(contestants: Sequence[Contestant]) -> float:
    """The longest pass of a worker of interval 1; 0 if there is none."""
    passes = [
        statistics.median(f.worker or 0.0 for f in contestant.steps(8, 0.0))
        for contestant in contestants
        if contestant.side.extended and contestant.side.interval == 1 and contestant.side.native
    ]
    return max(passes, default=0.0)


def compare(
    contestants: Sequence[Contestant], args: argparse.Namespace
) -> dict[str, tuple[list[dict[str, Any]], list[report.Comparison]]]:
    """Rows and comparisons by title. A real accelerator's own time is taken as it is; the CPU's is made longer by
    sleeping."""
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
        f"{title}: sleeps {1e3 * length:.0f} ms a step": timings(contestants, args.turns, args.steps, length)
        for title, seconds in lengths.items()
        for length in seconds
    }


def batch_of(text: str) -> Batch:
    """Sequences and tokens of each, from "4x8192"."""
    rows, length = text.split("x")
    return int(rows), int(length)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    names = list(dict.fromkeys(side.name for side in (*SIDES, *ALONE_SIDES)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=32, help="million parameters (default 32)")
    parser.add_argument("--model", choices=SHAPES, help="train this Llama, each way alone (default: linear layers)")
    parser.add_argument(
        "--batches", type=batch_of, nargs="+", metavar="ROWSxLENGTH", help="of a Llama (default: its shape's)"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument("--rows", type=int, default=4, help="rows of the batch: the real work of a step (default 4)")
    parser.add_argument("--turns", type=int, default=6, help="turns that each way to train takes (default 6)")
    parser.add_argument("--steps", type=int, default=8, help="steps a turn (default 8)")
    parser.add_argument("--threads", type=int, help="of the trainer (default: its cores, half where a worker has half)")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--device-ms", type=float, nargs="+", help="lengths of the simulated device's step")
    parser.add_argument("--no-memory", action="store_true", help="no memory")
    parser.add_argument("--no-profile", action="store_true", help="of a Llama: nothing that needs the profiler")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], list[report.Comparison]]:
    """All tables by title, and ours beside rivals."""
    if args.model:
        return {args.model: measure_alone(args)}, []
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
        links = {contestant.side.name: contestant.call(link_bytes, 4)[0] for contestant in contestants}
        used = {contestant.side.name: contestant.call(threads)[0] for contestant in contestants}
        partition = contestants[0].parameters / args.ranks
    tables = {title: rows for title, (rows, _) in timed.items()}
    comparisons = [one for _, found in timed.values() for one in found]
    for row in memories:
        link = links[str(row["variant"])]
        if link is not None:
            row["link down B/parameter"], row["link up B/parameter"] = (moved / partition for moved in link)
    if memories:
        tables[MEMORY] = memories
        quantity = "host B/parameter"
        held = {row["variant"]: [row[quantity]] for row in memories}
        comparisons += compared("host memory of the optimizer", quantity, held, used)
    if args.device == "cpu" and not args.device_ms:
        longer, shorter = list(tables.values())[:2]
        tables["checks (SIMULATED device)"] = checks(longer, shorter)
    return tables, comparisons


def measure_alone(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the ways to train a Llama, those that earlier runs have left in the file included; each is kept as soon
    as it is measured."""
    name, rows = f"offload_step_{args.model}", list[dict[str, Any]]()
    for side in (side for side in ALONE_SIDES if side.name in args.only):
        for row in alone(side, args):
            rows = report.merge(name, vars(args), [row], key="case")
    return with_practicality([{n: value for n, value in row.items() if n != "made"} for row in rows])


def with_practicality(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, each with the median step of plain ZeRO on its batch over its own, where there is one."""
    zero = {row["batch"]: row["median ms"] for row in rows if row["variant"] == sides.ZERO.name}
    return [
        row | ({"practicality": zero[row["batch"]] / row["median ms"]} if row["batch"] in zero else {}) for row in rows
    ]


def alone(side: Side, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One way to train a Llama, a row for each batch: the times of its steps, the memory that it takes and what the
    profiler says."""
    warm_up = 7 * side.interval if side.extended else 3  # five intervals are synchronous, two more settle
    shape = SHAPES[args.model]
    begin = time.perf_counter()
    with closing(Contestant(side, Workload(model=args.model), args, warm_up)) as contestant:
        made = time.perf_counter() - begin
        used = contestant.call(threads)[0]
        for batch in args.batches or [(shape.batch, shape.sequence)]:
            row = {"case": f"{side.name}, {'x'.join(map(str, batch))}"} | plain_row(side, contestant, batch, args)
            yield row | {"threads": used, "seconds to the first batch": made}


def plain_row(side: Side, contestant: Contestant, batch: Batch, args: argparse.Namespace) -> dict[str, Any]:
    """What steps of a training loop on `batch` take: medians over turns, of which each is one stretch of steps."""
    tokens = batch[0] * batch[1] * args.ranks
    few = max(FEWEST_STEPS, side.interval)
    contestant.call(plain_steps, few, batch)
    turns = [contestant.call(plain_steps, args.steps, batch) for _ in range(args.turns)]
    stretches = [max((seconds for seconds, _ in ranks), key=sum) for ranks in turns]
    means = [1e3 * statistics.fmean(stretch) for stretch in stretches]
    median, longest = statistics.median(means), 1e3 * max(max(stretch) for stretch in stretches)
    row = {
        "variant": side.name,
        "batch": "x".join(map(str, batch)),
        "million parameters": contestant.parameters / 1e6,
        "median ms": median,
        "least ms": min(means),
        "most ms": max(means),
        "longest step ms": longest,
        "steps": args.turns * args.steps,
        "tokens/s": 1e3 * tokens / median,
        "TFLOP/s of 6 N": 6e-12 * contestant.parameters * tokens / median * 1e3,
    }
    row |= {name.removeprefix("zenflow_").replace("_", " "): value for name, value in turns[-1][0][1].items()}
    if not args.no_memory:
        row |= {f"{name} GiB": b and b / 2**30 for name, b in contestant.call(bytes_now)[0].items()}
    if not args.no_profile:
        row |= _profiled(contestant.call(use_of_device, few)[0], few * contestant.parameters)
    return row


def _profiled(use: dict[str, float | None] | None, stepped: int) -> dict[str, float | None]:
    """Columns of what the profiler says; none of it is known where there is no device."""
    names = {"compute_idle": "idle share, no kernel", "idle": "idle share, no kernel or copy"}
    columns = {text: use[name] if use else None for name, text in names.items()}
    for way in WAYS:
        nbytes = use and use[f"bytes_{way}"]
        columns[f"profiled {way} B/parameter"] = None if not nbytes else nbytes / stepped
    return columns


def main() -> None:
    args = arguments().parse_args()
    tables, comparisons = measure(args)
    for title, rows in tables.items():
        names = dict.fromkeys(name for row in rows for name in row)
        print(f"\n{title}\n\n{report.table(rows, {name: show for name in names})}")
    if args.model:  # written row by row
        return
    rows = [{"table": title, **row} for title, rows in tables.items() for row in rows]
    print(f"\nwritten to {report.write('offload_step', vars(args), rows, comparisons)}")


def show(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "pass" if value else "FAIL"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
