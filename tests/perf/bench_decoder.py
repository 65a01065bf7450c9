"""Steps of a decoder as a training loop makes them: plain ZeRO, ours and rivals, in turns on one
device.

    python -m tests.perf.bench_decoder --ways ZeRO ours [--model 1.5b] [--batches 1x2048 4x8192]
    [--turns 3]
                                       [--steps 10] [--alone] [--name NAME] [--device
                                       cpu|accelerator]

All ways of a call are built first, each in its own process, and take turns of a few steps: at each
batch, turn after turn, way after way. So they must fit beside each other; with ``--alone`` one
follows the other, and with ``--card 24`` it does so on a device of which another process holds all
memory but 24 GiB. Steps read their loss, and nothing else waits for the device. The first step of a
turn is not counted: the optimizer's process went on while other ways had the device. Means are over
all others of all turns, also of what ours measures itself; rows hold the seconds of each.

A way runs with its default config. The steps before its first turn, which are synchronous with
ours, are in no mean: ``warm-up ms`` is theirs, and ``ms with warm-up`` the mean of 1,000 steps that
begin with them.

A way that fails, or does not fit, is a row with its error, and the others go on. The host's memory
is watched: a way that takes too much of it is ended before the machine is. Start, warm-up and turn
have a limit each: a way that hangs is ended. Rows are kept as soon as a way is warm and after each
of its turns, in a file that later calls add to; a batch whose rows it has from this commit is not
measured again, unless ``--again``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

from deepspeed_ext.commands.memory.model import typical
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Model, read_config
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.places import Place
from tests.perf import card, decoder_rank, report
from tests.perf.decoder_rank import Batch, Stretch
from tests.perf.decoder_ways import WAYS, ZERO, Way
from tests.perf.language_model import SHAPES
from tests.perf.processes import Processes, guarded
from tests.support.ranks import RankError, nursery

SETTLING_STEPS = 2
"""Before the first turn on a batch, for which memory is allocated anew."""
LONG_RUN = 1000
LIMITS = (300.0, 300.0, 300.0)
"""Seconds: of the start, the warm-up, and a turn."""
ERROR_LETTERS = 300
GIB = 1 << 30


class Runner:
    """One way in its processes, and what has been measured of it."""

    def __init__(self, way: Way, args: argparse.Namespace) -> None:
        self.way, self.args = way, args
        self.batches: list[Batch] = args.batches
        self.turns: dict[Batch, list[Stretch]] = {batch: [] for batch in self.batches}
        self.memory: dict[Batch, dict[str, Any]] = {}
        self.plans: dict[Batch, dict[str, Any]] = {}
        self.warm_up: list[float] = []
        self.host_peak: int | None = None
        self.error = ""
        self._processes: Processes | None = None

    def start(self) -> None:
        """Build the loop."""
        with self._noted():
            start, *_ = self.args.limits
            self._processes = Processes(self.way.name, 1, self.args.device, start)
            card_bytes = int(self.args.card * GIB)
            self.facts = self._call(
                start, decoder_rank.open_bench, self.way.name, self.args.model, card_bytes
            )

    def make_warm(self) -> None:
        """Make the steps that do not count, while nothing else runs: ours chooses its plan from
        them."""
        with self._noted():
            count = self.args.warm_up if self.args.warm_up is not None else self.way.warm_up
            _, limit, _ = self.args.limits
            made = self._call(limit, decoder_rank.stretch, count - 1, self.batches[0])
            self.warm_up = [made.first, *made.seconds]

    def turn(self, batch: Batch, steps: int) -> None:
        """One turn on a batch."""
        settle = 0 if self.turns[batch] else SETTLING_STEPS
        with self._noted():
            *_, limit = self.args.limits
            self.turns[batch].append(self._call(limit, decoder_rank.stretch, steps, batch, settle))

    def meter(self, batch: Batch) -> None:
        """What memory and plan are, after the turns on a batch."""
        with self._noted():
            *_, limit = self.args.limits
            self.memory[batch] = self._call(limit, decoder_rank.memory)
            self.plans[batch] = self._call(limit, decoder_rank.plan)

    def _call(self, seconds: float, body: Any, *args: Any) -> Any:
        assert self._processes is not None, "it was started, and has not failed"
        with guarded(self._processes):
            (value,) = self._processes.call(body, *args, seconds=seconds)
        if self.args.alone:
            taken = self._processes.free_before - self._processes.least_free
            self.host_peak = max(0, taken)
        return value

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """An error inside the block is this way's result."""
        try:
            yield
        except (RuntimeError, RankError) as error:
            self.error = error_line(str(error))
            self.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is known so far, a row for each batch that was begun, and for the first as soon as
        it is warm; of a way that failed, a row for each."""
        for batch in self.batches:
            is_warm = self.warm_up and batch == self.batches[0]
            if self.turns[batch] or self.error or is_warm:
                yield self._row(batch)

    def _row(self, batch: Batch) -> dict[str, Any]:
        name = "x".join(map(str, batch))
        row: dict[str, Any] = {
            "case": f"{self.way.name}, {name}",
            "way": self.way.name,
            "batch": name,
        }
        row |= {"model": self.args.model, "warm-up steps": len(self.warm_up), "says": self.way.says}
        row |= {"steps": 0, "warm-up seconds": self.warm_up}
        if self.args.card:
            row["card GiB"] = self.args.card
        if self.error:
            row["error"] = self.error
        if turns := self.turns[batch]:
            seconds = [each for turn in turns for each in turn.seconds]
            row |= times_of(seconds, self.warm_up, batch[0] * batch[1])
            row |= means_of([step for turn in turns for step in turn.measurements])
            row |= {"step seconds": [turn.seconds for turn in turns]}
            row |= {"not counted, seconds": [turn.first for turn in turns]}
        if self.warm_up:
            row |= {"start seconds": self.facts["start seconds"], "threads": self.facts["threads"]}
            row |= planned(self.way, self.facts["parameters"])
        if self.host_peak is not None:
            row["host peak GiB"] = self.host_peak / GIB
        if found := self.memory.get(batch):
            row |= {
                f"{name} GiB": found[name] and found[name] / GIB
                for name in ("device", "host", "page-locked")
            }
        if plan := self.plans.get(batch):
            row["plan"] = plan
        return row

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


def error_line(text: str) -> str:
    """The line of an error that says what was wrong: the last of its traceback, before the log of
    the rank."""
    lines = [line for line in text.partition("--- ")[0].strip().splitlines() if line.strip()]
    said = next(
        (line for line in reversed(lines) if "Error" in line or "memory" in line), lines[-1]
    )
    return said.strip()[:ERROR_LETTERS]


def times_of(seconds: Sequence[float], warm_up: Sequence[float], tokens: int) -> dict[str, float]:
    """Means and spread of steps, in milliseconds."""
    mean = 1e3 * statistics.fmean(seconds)
    before = 1e3 * statistics.fmean(warm_up) if warm_up else mean
    counted = min(len(warm_up), LONG_RUN)
    return {
        "steps": len(seconds),
        "mean ms": mean,
        "deviation ms": 1e3 * statistics.pstdev(seconds),
        "median ms": 1e3 * statistics.median(seconds),
        "least ms": 1e3 * min(seconds),
        "longest ms": 1e3 * max(seconds),
        "warm-up ms": before,
        "ms with warm-up": (counted * before + (LONG_RUN - counted) * mean) / LONG_RUN,
        "tokens/s": 1e3 * tokens / mean,
    }


def means_of(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each measurement over the steps that know it."""
    names = dict.fromkeys(name for step in measured for name in step)
    return {
        name.removeprefix("zenflow_").replace("_", " "): statistics.fmean(
            step[name] for step in measured if name in step
        )
        for name in names
    }


def planned(way: Way, parameters: int) -> dict[str, float]:
    """GiB that the plan of memory says, without activations; empty where it knows nothing of the
    way."""
    if not way.is_engine:
        return {}
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(way.config, file)
            file.flush()
            setup, *_ = read_config(file.name, 1)
    except ConfigError:
        return {}
    plan = plan_memory(
        Model(parameters, typical(parameters).largest, "bfloat16"), Machine(1, 1), setup
    )
    return {
        "planned device GiB": plan.peak(Place.ACCELERATOR) / GIB,
        "planned host GiB": plan.host_peak() / GIB,
    }


def keep(runners: Sequence[Runner], args: argparse.Namespace) -> None:
    """Write what is known; of a way that begins anew, once it has more than an earlier call has
    kept."""
    steps = {row["case"]: row["steps"] for row in of_this_commit(args.name)}
    rows = [row for runner in runners for row in runner.rows()]
    rows = [row for row in rows if "error" in row or row["steps"] >= steps.get(row["case"], 0)]
    if rows:
        report.merge(args.name, vars(args), rows, key="case")


def take_turns(runners: Sequence[Runner], args: argparse.Namespace) -> None:
    """All turns of ways that are on the device together."""
    for batch in args.batches:
        for _ in range(args.turns):
            for runner in (each for each in runners if not each.error):
                runner.turn(batch, args.steps)
                keep([runner], args)
        for runner in (each for each in runners if not each.error):
            runner.meter(batch)
            keep([runner], args)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what is asked for; all rows of the file."""
    ways = [WAYS[name] for name in args.ways]
    args.alone = args.alone or args.card > 0
    if args.device == "cpu":
        nursery(args.device)
    # Note: [the threads that start ranks]
    # A rank, and the process that forks ranks, ends with the thread that has started it. So the
    # threads live until all is measured, and the process that forks is this thread's.
    ballast = card.held(args.card, args.device) if args.card else nullcontext()
    with ThreadPoolExecutor(len(ways)) as starters, ballast:
        for together in [[way] for way in ways] if args.alone else [ways]:
            wanted = argparse.Namespace(**vars(args))
            wanted.batches = [
                each for each in args.batches if args.again or not is_known(together, each, args)
            ]
            if wanted.batches:
                measure_together(together, wanted, starters)
    return kept_rows(args.name)


def measure_together(
    ways: Sequence[Way], args: argparse.Namespace, starters: ThreadPoolExecutor
) -> None:
    """Measure ways that are on the device together."""
    with ExitStack() as stack:
        runners = [stack.enter_context(closing(Runner(way, args))) for way in ways]
        list(starters.map(Runner.start, runners))
        keep([runner for runner in runners if runner.error], args)
        for runner in (each for each in runners if not each.error):
            runner.make_warm()
            keep([runner], args)
        take_turns(runners, args)
        keep(runners, args)


def is_known(ways: Sequence[Way], batch: Batch, args: argparse.Namespace) -> bool:
    """Whether the file has all steps of all these ways on this batch from this commit."""
    name = "x".join(map(str, batch))
    known = {
        row["way"]
        for row in of_this_commit(args.name)
        if row["batch"] == name and ("error" in row or row["steps"] >= args.turns * args.steps)
    }
    return {way.name for way in ways} <= known


def of_this_commit(name: str) -> list[dict[str, Any]]:
    """The rows of the file that were measured at this commit."""
    commit = report.commit()
    return [row for row in kept_rows(name) if row["made"]["commit"] == commit]


def kept_rows(name: str) -> list[dict[str, Any]]:
    """The rows of the file, if there is one."""
    path = report.path_of(name)
    return json.loads(path.read_text())["rows"] if path.exists() else []


def with_practicality(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, each with the mean step of plain ZeRO, on the same batch, over its
    own."""
    zero = {
        row["batch"]: row["mean ms"] for row in rows if row["way"] == ZERO.name and "mean ms" in row
    }
    return [
        row
        | (
            {"practicality": zero[row["batch"]] / row["mean ms"]}
            if row["batch"] in zero and "mean ms" in row
            else {}
        )
        for row in rows
    ]


COLUMNS = {
    "way": "",
    "batch": "",
    "steps": "d",
    **dict.fromkeys(
        ("mean ms", "deviation ms", "least ms", "longest ms", "ms with warm-up"), ".1f"
    ),
    **dict.fromkeys(("practicality", "wait ms", "worker ms"), ".2f"),
    **dict.fromkeys(("card GiB", "device GiB", "planned device GiB"), ".2f"),
    **dict.fromkeys(("host GiB", "host peak GiB", "planned host GiB"), ".2f"),
    "error": "",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    return report.table(with_practicality(rows), COLUMNS)


def batch_of(text: str) -> Batch:
    """Sequences and tokens of each, from "4x8192"."""
    rows, length = text.split("x")
    return int(rows), int(length)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, required=True, metavar="WAY", help=f"of {list(WAYS)}"
    )
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument(
        "--batches", type=batch_of, nargs="+", default=[(1, 8192)], metavar="ROWSxLENGTH"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="turns of each way on each batch (default 3)"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default 10)")
    parser.add_argument(
        "--warm-up", type=int, help="steps before the first turn (default: what the way needs)"
    )
    parser.add_argument(
        "--alone", action="store_true", help="one way after the other: not beside each other"
    )
    parser.add_argument(
        "--card", type=float, default=0.0, help="GiB of the device's memory (default: all); --alone"
    )
    parser.add_argument(
        "--limits",
        type=float,
        nargs=3,
        default=LIMITS,
        metavar=("START", "WARM-UP", "TURN"),
        help="seconds after which a way is ended (default %(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="also what the file has from this commit"
    )
    parser.add_argument(
        "--name", default="decoder", help="of the file of results (default decoder)"
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    return parser


def main() -> None:
    args = arguments().parse_args()
    try:
        rows = measure(args)
    except card.CardError as error:
        print(f"skipped: {error}")
        sys.exit(card.SKIPPED)
    print(f"\n{table(rows)}\n\nwritten to {report.path_of(args.name)}")


if __name__ == "__main__":
    main()
