"""Core binding: ZeRO-Offload and ZenFlow unbound, bound at launch, in code as DeepSpeed does it,
and by ours.

    python -m tests.perf.bench_binding [--only offload upstream ours ladder beside tuner] [--ranks 1
    2] [--rounds 8]
                                       [--device cpu|accelerator] [--model linears|0.5b|...]
                                       [--fresh] [--pause]
    python -m tests.perf.bench_binding --show [FILE]

- offload, upstream, ours: a training step of ZeRO-Offload, of DeepSpeed's ZenFlow, overlapped, and
  of ours at interval 1, for each number of ranks. Beside them runs plain ZeRO; practicality is its
  step over that of the row.
- ladder: what the launcher does and binding in code does not, one mechanism at a time: ZeRO-Offload
  on the largest number of ranks, with plain ZeRO.
- beside: the same for an optimizer and a launch-bound training step, each in a process of its own.
- tuner: what the tuner chooses, against every number of cores that it could have chosen.

All ways get the same CPUs and take turns, A B C A B C...; a number is the median of the turns'
means. Beside the time stand the switches and moves of threads that the kernel counted, and the mask
of every thread. Each row is kept in ``outputs/bench/binding.json`` as soon as its table is
complete, and later runs add to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.cores.plan import PlanRequest, plan_host
from deepspeed_ext.cores.report import read_host
from deepspeed_ext.cores.tune.tuner import Tuner, TuneSettings, local_host
from deepspeed_ext.runtime.cpulist import format_cpulist
from deepspeed_ext.runtime.words import counted
from tests.perf import report
from tests.perf.binding_teams import Team, TeamError
from tests.perf.binding_ways import (
    LADDER,
    OURS,
    STUDY,
    TASKSET,
    UNBOUND,
    ZENFLOW_STUDY,
    Load,
    Place,
    Task,
    Turn,
    Way,
)
from tests.perf.language_model import SHAPES
from tests.perf.threads import mask_text

NAME = "binding"
PARTS = ("offload", "upstream", "ours", "ladder", "beside", "tuner")
TITLES = {
    "offload": "ZeRO-Offload",
    "upstream": "DeepSpeed's ZenFlow, overlapped",
    "ours": "ZenFlow of deepspeed_ext, interval 1",
    "ladder": "One mechanism at a time: ZeRO-Offload",
    "beside": "One mechanism at a time: an optimizer and a training process",
}
INTERVAL = (
    16  # DeepSpeed's ZenFlow updates in the fourth of its steps, and selects in the sixteenth
)
WARM_UP = 28  # five intervals of 4 are synchronous, two more settle
BESIDE_SECONDS = 1.0
ZERO = replace(TASKSET, name="plain ZeRO, taskset")


def places(ranks: int, device: str) -> tuple[Place, ...]:
    """Where each rank belongs, by our plan: as a whole, and divided into training and optimizer."""
    nodes = (
        [rank.accelerator_node for rank in local_host(ranks, None, None).ranks]
        if device != "cpu"
        else None
    )
    host = read_host("/", None, nodes or [None] * ranks)
    whole = plan_host(host.topology, host.ranks, PlanRequest(separate=False)).ranks
    split = plan_host(host.topology, host.ranks).ranks
    return tuple(
        Place(
            format_cpulist(all_of.pytorch),
            all_of.pytorch_threads,
            format_cpulist(part.pytorch),
            part.pytorch_threads,
            format_cpulist(part.optimizer),
        )
        for all_of, part in zip(whole, split, strict=True)
    )


def tasks(
    part: str,
    way: Way,
    where: Sequence[Place],
    args: argparse.Namespace,
    tuned_cores: int | None = None,
) -> list[Task]:
    """The tasks of a team."""
    common = {
        "device": args.device,
        "model": args.model,
        "millions": args.millions,
        "elements": args.elements,
    }
    if part == "beside":
        loads: tuple[Load, ...] = ("training", "optimizer")
        return [Task("", "", way, load, tuple(where[:1]), **common) for load in loads]
    load: Any = "zero" if way is ZERO else "offload" if part == "ladder" else part
    # nothing runs beside the training: it has all cores of the rank
    if load in ("zero", "offload"):
        where = [replace(p, training=p.rank, training_cores=p.cores, optimizer="") for p in where]
    warm_up = min(WARM_UP, args.warm_up) if load == "upstream" else min(4, args.warm_up)
    cores = tuned_cores if way.tuned else None
    return [Task("", "", way, load, tuple(where), warm_up=warm_up, optimizer_cores=cores, **common)]


def ways_of(part: str, names: Sequence[str] | None) -> list[Way]:
    """The ways that are compared in a part; of plain ZeRO-Offload, which has no split, there is
    nothing to tune."""
    ways = {"offload": STUDY, "ladder": LADDER, "beside": LADDER}.get(part, ZENFLOW_STUDY)
    if part == "beside":
        ways = tuple(way for way in ways if way.launcher != "deepspeed")
    if part in ("ours", "upstream"):  # only ours takes a number of cores for its optimizer
        ways = tuple(way for way in ways if not way.tuned or part == "ours")
    chosen = [way for way in ways if not names or way.name in names]
    return chosen if part == "beside" else [ZERO, *chosen]


@contextlib.contextmanager
def teams_of(
    part: str, ways: Sequence[Way], ranks: int, args: argparse.Namespace, tuned_cores: int | None
) -> Iterator[dict[str, Team]]:
    """One team a way, each complete and warm before the next starts; without DeepSpeed's launcher
    if it fails here."""
    where, teams = places(ranks, args.device), {}
    with contextlib.ExitStack() as stack:
        for way in ways:
            try:
                team = Team.start(tasks(part, way, where, args, tuned_cores))
            except TeamError as error:
                if way.launcher != "deepspeed":
                    raise
                print(f"SKIPPED {error}", flush=True)
                continue
            teams[way.name] = stack.enter_context(contextlib.closing(team))
            if way is OURS:
                require_within(team)
        yield teams


def require_within(team: Team) -> None:
    """Raise `TeamError` if a thread of a team that ours has bound may run outside of its rank's
    part."""
    for (load, rank), facts in team.facts.items():
        place = team.tasks[0].places[rank]
        roles = [(place.optimizer if load == "optimizer" else place.training, facts.threads)]
        if facts.worker is not None:
            roles.append((place.optimizer, facts.worker))
        for cpus, masks in roles:
            if strays := {mask: number for mask, number in masks.items() if mask != cpus}:
                raise TeamError(
                    f"{load}, rank {rank}: expected every thread on {cpus}, got {mask_text(strays)}"
                )


def turns_of(
    part: str, ranks: int, args: argparse.Namespace, tuned_cores: int | None
) -> Iterator[tuple[Team, dict[tuple[Load, int], Turn]]]:
    """The turns that count, A B C A B C..., each with its team; with ``--fresh`` every turn has a
    new one."""
    ways = ways_of(part, args.ways)
    size = (args.steps, 0.0) if part != "beside" else (1, args.seconds)
    if args.fresh:
        by_name = {way.name: way for way in ways}
        for _, name in report.alternate(list(by_name), args.rounds, warm_up=0):
            with teams_of(part, [by_name[name]], ranks, args, tuned_cores) as teams:
                for team in teams.values():
                    yield team, team.turn(*size)
        return
    with teams_of(part, ways, ranks, args, tuned_cores) as teams:
        if args.pause:
            input("everything is started and warm: Enter begins the turns\n")
        for turn, name in report.alternate(list(teams), args.rounds):
            answers = teams[name].turn(*size)
            if turn >= 0:
                yield teams[name], answers


def measure(
    part: str, ranks: int, args: argparse.Namespace, tuned_cores: int | None
) -> list[dict[str, Any]]:
    """The rows of one table."""
    teams: dict[str, Team] = {}
    taken: dict[str, list[dict[tuple[Load, int], Turn]]] = {}
    for team, answers in turns_of(part, ranks, args, tuned_cores):
        teams[team.way.name] = team
        taken.setdefault(team.way.name, []).append(answers)
    return rows_of(part, ranks, teams, taken)


def rows_of(
    part: str,
    ranks: int,
    teams: dict[str, Team],
    taken: dict[str, list[dict[tuple[Load, int], Turn]]],
) -> list[dict[str, Any]]:
    """A row a way; of "beside", one for each of its two processes."""
    rows: list[dict[str, Any]] = []
    loads = ("training", "optimizer") if part == "beside" else ("",)
    for load in loads:
        first = len(rows)
        for name, team in teams.items():
            keys = [key for key in team.facts if key[0] == load or not load]
            turns = [[answers[key] for key in keys] for answers in taken[name]]
            row = {
                "row": f"{part} {load} {ranks} {name}",
                "part": part,
                "ranks": ranks,
                "process": load,
                "way": name,
            }
            row |= figures(turns)
            row |= {
                "pool": team.facts[keys[0]].pool,
                "threads": " / ".join(told(team, key) for key in keys),
            }
            rows.append(row)
        compare(rows[first:])
    return rows


def figures(turns: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Of each turn the slowest rank's step, and the sums of all ranks' counts; then over the
    turns."""
    counts = {
        name: statistics.median(sum(getattr(turn, name) for turn in ranks) for ranks in turns)
        for name in ("involuntary", "migrations", "queued_ms")
    }
    slowest = [1e3 * max(turn.seconds for turn in ranks) for ranks in turns]
    return {"step ms": report.summary(slowest), "turns ms": slowest, **counts}


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add the ratio to the unbound row, and practicality where plain ZeRO was measured."""
    medians = {row["way"]: row["step ms"]["median"] for row in rows}
    for row in rows:
        own = medians[row["way"]]
        row["ratio"] = own / medians[UNBOUND.name] if UNBOUND.name in medians else None
        row["practicality"] = medians[ZERO.name] / own if ZERO.name in medians else None


def beside_ours(rows: Sequence[dict[str, Any]]) -> list[report.Comparison]:
    """Ours beside each other way of its table, turn by turn; the threads are those of a process."""
    found = []
    for ours in (row for row in rows if row["way"] == OURS.name):
        process = f", the {ours['process']} process" if ours["process"] else ""
        subject = f"core binding: {TITLES[ours['part']]}{process}, {counted(ours['ranks'], 'rank')}"
        for row in rows:
            if row["process"] == ours["process"] and row["way"] not in (OURS.name, ZERO.name):
                turns, pools = (ours["turns ms"], row["turns ms"]), (ours["pool"], row["pool"])
                found.append(report.compare(subject, row["way"], "step, ms", *turns, pools))
    return found


def told(team: Team, key: tuple[Load, int]) -> str:
    """Every thread of a process by its mask, and of its optimizer process."""
    facts = team.facts[key]
    return mask_text(facts.threads) + (
        f" + worker {mask_text(facts.worker)}" if facts.worker is not None else ""
    )


def tuner_rows(settings: TuneSettings) -> list[dict[str, Any]]:
    """Each number of cores there is, and whether it is the tuner's choice."""
    with Tuner(local_host(1, None, None), settings) as tuner:
        chosen = tuner.run()["opt_cores_per_rank"]
        points = [
            max((tuner.measure(cores) for _ in range(3)), key=lambda point: point.gb_per_s)
            for cores in range(1, tuner.maximum + 1)
        ]
    best = max(point.gb_per_s for point in points)
    return [
        {
            "row": f"tuner {point.cores}",
            "part": "tuner",
            "optimizer cores": point.cores,
            "GB/s": point.gb_per_s,
            "of the best": point.gb_per_s / best,
            "chosen": "<-" if point.cores == chosen else "",
        }
        for point in points
    ]


def tune(ranks: int) -> int:
    """Print what ``deepspeed-ext tune`` says, and return the optimizer cores that it chose."""
    words = [sys.executable, "-m", "deepspeed_ext.commands.main", "tune", "--quick", "--json"]
    done = subprocess.run(
        [*words, "--ranks", str(ranks)], capture_output=True, text=True, check=False, timeout=120
    )
    print((done.stdout + done.stderr).strip(), flush=True)
    return int(json.loads(done.stdout)["opt_cores_per_rank"])


def spread(value: dict[str, float]) -> str:
    """Median and extremes of a cell."""
    return f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"


COLUMNS = {
    "way": "",
    "step ms": spread,
    "ratio": ".2f",
    "practicality": ".2f",
    "involuntary": ".1f",
    "migrations": ".1f",
    "queued_ms": ".1f",
    "pool": "",
    "threads": "",
}
TUNER = {"optimizer cores": "", "GB/s": ".1f", "of the best": ".3f", "chosen": ""}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the tables of the rows."""
    for part, ranks, process in dict.fromkeys(
        (row["part"], row.get("ranks"), row.get("process")) for row in rows
    ):
        chosen = [
            row
            for row in rows
            if (row["part"], row.get("ranks"), row.get("process")) == (part, ranks, process)
        ]
        if part == "tuner":
            print(
                f"\nThe tuner against every possible choice\n\n{report.table(chosen, TUNER)}",
                flush=True,
            )
            continue
        where = f", the {process} process" if process else ""
        print(f"\n{TITLES[part]}{where}, {counted(ranks, 'rank')}")
        print(f"\n{report.table(chosen, COLUMNS)}", flush=True)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {PARTS}"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 2], help="numbers of ranks (default 1 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns that each way takes (default 8)"
    )
    parser.add_argument(
        "--steps", type=int, default=INTERVAL, help=f"steps a turn (default {INTERVAL})"
    )
    parser.add_argument("--seconds", type=float, default=BESIDE_SECONDS, help="of a turn of beside")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=WARM_UP,
        help=f"most steps before the turns (default {WARM_UP})",
    )
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="names of ways (default: all)")
    parser.add_argument(
        "--model", choices=("linears", *SHAPES), default="linears", help="what is trained"
    )
    parser.add_argument(
        "--millions", type=float, default=8, help="million parameters of the linears (default 8)"
    )
    parser.add_argument(
        "--elements", type=int, default=16 << 20, help="that the optimizer of beside updates"
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--anew", action="store_true", help="forget what earlier runs have kept")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="new processes for each turn: where not all fit in memory",
    )
    parser.add_argument(
        "--pause", action="store_true", help="wait for Enter between start and turns of each table"
    )
    parser.add_argument(
        "--show", nargs="?", type=Path, const=report.path_of(NAME), help="print a file's tables"
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the teams are ended first
    if args.show:
        show(json.loads(args.show.read_text())["rows"])
        return
    if args.anew:
        report.path_of(NAME).unlink(missing_ok=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("show", "pause")}
    for part in args.only:
        numbers = {"tuner": [1], "beside": [1], "ladder": [max(args.ranks)]}.get(part, args.ranks)
        for ranks in numbers:
            is_tuner = part == "tuner"
            found = (
                tuner_rows(TuneSettings.for_host(1, quick=False))
                if is_tuner
                else measure(part, ranks, args, tune(ranks) if part == "ours" else None)
            )
            show(found)
            report.merge(NAME, settings, found, "row", [] if is_tuner else beside_ours(found))
    print(f"\nkept in {report.path_of(NAME)}")


if __name__ == "__main__":
    main()
