"""Core binding: unbound, bound by the launcher, by DeepSpeed's own code, and by ours, side by side in one run.

    python -m tests.perf.bench_binding [--rounds 9] [--only beside offload tuner]

- beside: CPU Adam in a process of its own and a launch-bound training step, at the same time, as ZenFlow runs them;
- offload: the training step of ZeRO-2 with CPU offload, on two ranks;
- tuner: what the tuner chooses, against every number of cores that it could have chosen.

All four ways get the same CPUs. They alternate A B C D A B C D...; each number is a median over the rounds' medians.
"unbound" leaves the thread count to torch, as a script started by hand does; "launcher" is taskset and
OMP_NUM_THREADS in the command; "upstream" moves the main thread after torch is imported, as DeepSpeed 0.19.8 does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

from deepspeed_ext.affinity.host_facts import read_host
from deepspeed_ext.affinity.plan import HostPlan, PlanRequest, plan_host
from deepspeed_ext.host.cpulist import format_cpulist
from deepspeed_ext.tuning.tuner import Tuner, TuneSettings, local_host
from tests.perf import report

WAYS = ("unbound", "launcher", "upstream", "ours")
RANKS_OF_OFFLOAD = 2
ANSWER_TIMEOUT_SECONDS = 180


@dataclass
class Process:
    """A bound process that takes steps on request."""

    connection: Connection
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, way: str, cpus: Sequence[int], load: str, rank: int, ranks: int, folder: str) -> Process:
        ours, theirs = Pipe()
        arguments = [str(theirs.fileno()), way, format_cpulist(cpus), load, str(rank), str(ranks), folder]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
        environment |= {"DSEXT_LOG_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
        prefix = []
        if way == "launcher":
            prefix = ["taskset", "-c", format_cpulist(cpus)]
            environment["OMP_NUM_THREADS"] = str(len(cpus))
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.perf.binding_worker", *arguments],
            env=environment,
            cwd=report.ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        return cls(ours, process)

    def receive(self) -> Any:
        if not self.connection.poll(ANSWER_TIMEOUT_SECONDS):
            raise TimeoutError(f"{' '.join(map(str, self.process.args))} does not answer")  # type: ignore[arg-type]
        return self.connection.recv()


@dataclass
class Team:
    """The processes of one way."""

    processes: list[Process] = field(default_factory=list)

    def turn(self, steps: int, seconds: float) -> list[float]:
        """Median step of each process, all running at once for ``seconds``, with at least ``steps``."""
        for process in self.processes:
            process.connection.send((steps, seconds))
        return [statistics.median(process.receive()) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.connection.close()
            process.process.kill()
            process.process.wait()


def start_teams(load: str, plan: HostPlan) -> dict[str, Team]:
    """One team a way; each is complete and warmed up before the next starts."""
    teams: dict[str, Team] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"{folder}/rendezvous"
            if load == "beside":
                loads = [("adam", plan.ranks[0].optimizer), ("training", plan.ranks[0].pytorch)]
                team = Team([Process.start(way, cpus, load, 0, 1, rendezvous) for load, cpus in loads])
            else:
                ranks = list(plan.ranks)
                team = Team(
                    [
                        Process.start(way, rank.pytorch, "offload", rank.local_rank, len(ranks), rendezvous)
                        for rank in ranks
                    ]
                )
            teams[way] = team
            for process in team.processes:
                process.receive()
    return teams


def measure(load: str, plan: HostPlan, rounds: int) -> dict[str, list[list[float]]]:
    """For each way the medians of each round: one number a process."""
    teams = start_teams(load, plan)
    turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    try:
        for turn, way in report.alternate(WAYS, rounds):
            medians = teams[way].turn(5, 1.0) if load == "beside" else teams[way].turn(6, 0.0)
            if turn >= 0:
                turns[way].append(medians)
    finally:
        for team in teams.values():
            team.close()
    return turns


def rows_of(turns: dict[str, list[list[float]]], columns: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a way: the summary of each column in milliseconds, and its ratio to unbound."""
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        row: dict[str, Any] = {"way": way}
        for name, pick in columns.items():
            row[f"{name} ms"] = report.summary([1e3 * pick(medians) for medians in turns[way]])
            base = rows[0][f"{name} ms"]["median"] if rows else row[f"{name} ms"]["median"]
            row[f"{name} ratio"] = row[f"{name} ms"]["median"] / base
        rows.append(row)
    return rows


def comparisons_of(
    what: str, turns: dict[str, list[list[float]]], columns: dict[str, Any], cores: int
) -> list[report.Comparison]:
    """Ours beside each of the other ways; all have `cores` cores, and but for "unbound" a thread for each."""
    return [
        report.compare(
            what,
            way,
            f"{name}, ms",
            [1e3 * pick(medians) for medians in turns["ours"]],
            [1e3 * pick(medians) for medians in turns[way]],
            (f"{cores} a process", "as torch chooses" if way == "unbound" else f"{cores} a process"),
        )
        for name, pick in columns.items()
        for way in WAYS[:-1]
    ]


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
            "optimizer cores": point.cores,
            "GB/s": point.gb_per_s,
            "of the best": point.gb_per_s / best,
            "chosen": "<-" if point.cores == chosen else "",
        }
        for point in points
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n\n{report.table(rows, dict.fromkeys(rows[0], report.shown))}", flush=True)


def beside(rounds: int) -> tuple[list[dict[str, Any]], list[report.Comparison]]:
    """CPU Adam and a training step at the same time."""
    host = read_host("/")
    plan = plan_host(host.topology, host.ranks)
    turns = measure("beside", plan, rounds)
    columns = {"adam": lambda medians: medians[0], "training": lambda medians: medians[1]}
    rows = rows_of(turns, columns)
    show("CPU Adam beside a launch-bound training step", rows)
    what = "core binding, CPU Adam beside a launch-bound training step"
    return rows, comparisons_of(what, turns, columns, len(plan.ranks[0].pytorch))


def offload(rounds: int) -> tuple[list[dict[str, Any]], list[report.Comparison]]:
    """The training step of ranks that share the cores."""
    host = read_host("/", None, [None] * RANKS_OF_OFFLOAD)
    plan = plan_host(host.topology, host.ranks, PlanRequest(separate=False))
    turns = measure("offload", plan, rounds)
    rows = rows_of(turns, {"step": max})
    show(f"ZeRO-2 with CPU offload, {RANKS_OF_OFFLOAD} ranks", rows)
    what = f"core binding, step of ZeRO-2 with CPU offload, {RANKS_OF_OFFLOAD} ranks"
    return rows, comparisons_of(what, turns, {"step": max}, len(plan.ranks[0].pytorch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    loads = ("beside", "offload", "tuner")
    parser.add_argument("--only", nargs="+", choices=loads, default=loads)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    comparisons: list[report.Comparison] = []
    for name, load in {"beside": beside, "offload": offload}.items():
        if name in args.only:
            rows, found = load(args.rounds)
            results += [{"load": name, **row} for row in rows]
            comparisons += found
    if "tuner" in args.only:
        rows = tuner_rows(TuneSettings.for_host(1, quick=False))
        show("The tuner against every possible choice", rows)
        results += [{"load": "tuner", **row} for row in rows]
    print(f"\nwritten to {report.write('binding', vars(args), results, comparisons)}")


if __name__ == "__main__":
    main()
