"""Mutate values: run random mutants of the modules that decide against the tests that run the
changed line.

    python -m tests.mutations.values [--count 300] [--seed 1] [--only TEXT] [--processes 2]
    [--seconds 25] [--again]

First it records which lines each test runs; the record is kept, and made again for files that have
changed. Then each mutant meets first the tests without ranks and then some with ranks,
until one fails. A mutant that no test runs survives. Results are in outputs/mutants: a line of JSON
a mutant, and a page of the survivors; a campaign that was interrupted goes on. `--again` tries
again what survived or did not end in time: there may be new tests, and on a busy machine a timeout
need not be the mutant's doing. So a first pass with few `--seconds` costs little, and `--again`
with more of them gives the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutations.mutants import MODULES, Mutant, draw
from tests.mutations.record import MOST_SECONDS, Record, Test, choose
from tests.mutations.rooms import Room, Run
from tests.support.paths import ROOT

__all__ = ["Result", "page"]

OUTPUTS = ROOT / "outputs" / "mutants"
PAUSE_SECONDS = 0.05
FAILED_TESTS = 1
SLOW = ("Timeout (>", "did not finish within")
"""What pytest and our ranks say of a test that does not end."""


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        state: "killed", "timeout" or "survived".
        by: the test that noticed it, or how many did not.
    """

    name: str
    kind: str
    state: str
    by: str
    seconds: float


class Task:
    """Something that runs in a room: `start` begins it, `done` takes the run when it has
    ended, and returns what that room does next."""

    def __init__(
        self,
        start: Callable[[Room], Run],
        done: Callable[[Room, Run, bool], Task | None],
        limit: float,
    ) -> None:
        self.start, self.done, self.limit = start, done, limit


def run_all(tasks: Sequence[Task], rooms: Sequence[Room]) -> None:
    """Run `tasks`, one in each of `rooms` at a time."""
    waiting, running = list(tasks), dict[Room, tuple[Task, Run]]()
    try:
        while waiting or running:
            for room in rooms:
                if room in running:
                    task, run = running[room]
                    overran = run.poll() is None and run.seconds > task.limit
                    if run.poll() is None and not overran:
                        continue
                    run.end()
                    del running[room]
                    if (following := task.done(room, run, overran)) is not None:
                        running[room] = following, following.start(room)
                if waiting and room not in running:
                    task = waiting.pop(0)
                    running[room] = task, task.start(room)
            time.sleep(PAUSE_SECONDS)
    finally:
        for _, run in running.values():
            run.end()


def record_tasks(record: Record, folder: Path) -> Iterator[Task]:
    """A task for each file of tests that is not recorded."""
    for number, name in enumerate(record.missing()):
        target = folder / f"lines-{number}"

        def done(
            room: Room, run: Run, overran: bool, name: str = name, target: Path = target
        ) -> Task | None:
            passed = record.add(name, target)
            print(f"{name}: {passed} tests in {run.seconds:.0f} s, status {run.poll()}", flush=True)
            return None

        def start(room: Room, name: str = name, target: Path = target) -> Run:
            return record.start(name, room, target)

        yield Task(start, done, 1800)


def mutant_task(
    mutant: Mutant,
    tests: Sequence[Test],
    keep: Callable[[Result], None],
    later: Sequence[Test] = (),
) -> Task:
    """The task that tries one mutant. A test with ranks that fails among others is run again alone:
    on a busy machine such a test may fail without the mutant.

    Args:
        later: tests that follow if all of `tests` pass.
    """
    longest, total = max(test.seconds for test in tests), sum(test.seconds for test in tests)

    def start(room: Room) -> Run:
        _write(room, mutant, mutant.source)
        names = [test.name for test in tests]
        return room.start(
            ["-x", "--full", "-p", "no:anyio", "--timeout", f"{60 + 20 * longest:.0f}", *names]
        )

    def done(room: Room, run: Run, overran: bool) -> Task | None:
        _write(room, mutant, mutant.original)
        by = room.failure.read_text() if room.failure.exists() else f"{len(tests)} tests"
        if run.poll() == 0 and later:
            return mutant_task(mutant, later, keep)
        at = next((at for at, test in enumerate(tests) if test.name == by), None)
        if len(tests) > 1 and at is not None and tests[at].has_ranks:
            return mutant_task(mutant, tests[at : at + 1], keep, later=tests[at + 1 :])
        late = overran or any(words in room.log for words in SLOW)
        state = "survived" if run.poll() == 0 else "timeout" if late else "killed"
        if state == "killed" and run.poll() != FAILED_TESTS:
            by += f" (pytest ended with {run.poll()})"
        keep(Result(mutant.name, mutant.site.kind, state, by, run.seconds))
        return None

    return Task(start, done, 120 + 10 * total)


def _write(room: Room, mutant: Mutant, source: str) -> None:
    path = room.path / "deepspeed_ext" / mutant.site.path
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()  # it may have the size and the second of this source
    path.write_text(source)


class Results:
    """What became of the mutants of a campaign, in a file that grows by a line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_name = {
            result.name: result for result in (Result(**json.loads(line)) for line in lines)
        }

    def keep(self, result: Result) -> None:
        self.by_name[result.name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(
            f"{result.state:8} {result.seconds:4.0f} s  {result.name}\n         {result.by}",
            flush=True,
        )


def page(results: Sequence[Result], command: str) -> str:
    """The counts and the survivors, as a page."""
    states = Counter(result.state for result in results)
    killed = states["killed"] + states["timeout"]
    rows = [
        f"`{command}`: {len(results)} mutants, {states['killed']} killed, {states['timeout']} "
        f"timed out, {states['survived']} survived ({killed / max(1, len(results)):.1%} died)."
    ]
    for result in results:
        if result.state == "survived":
            place, _, diff = result.name.partition(": ")
            rows += ["", f"`{place}`, {result.by}:", "", "```diff", diff, "```"]
    return "\n".join(rows) + "\n"


@contextmanager
def made_rooms(count: int) -> Iterator[list[Room]]:
    with tempfile.TemporaryDirectory(prefix="dsm-") as folder:
        yield [Room(Path(folder) / str(number)) for number in range(count)]


def campaign(args: argparse.Namespace) -> int:
    """Record, draw, run and report; 0 if none survived."""
    record, results = Record(OUTPUTS / "record.json"), Results(OUTPUTS / f"{args.seed}.jsonl")
    paths = [path for path in MODULES if args.only in path]
    mutants = draw(args.count, args.seed, paths)
    with made_rooms(args.processes) as rooms:
        run_all(list(record_tasks(record, rooms[0].path.parent)), rooms)
        tests, tasks = record.tests(), []
        for mutant in mutants:
            known = results.by_name.get(mutant.name)
            if known is not None and not (known.state != "killed" and args.again):
                continue
            if chosen := choose(mutant, tests, args.seconds):
                tasks.append(mutant_task(mutant, chosen, results.keep))
            else:
                results.keep(
                    Result(mutant.name, mutant.site.kind, "survived", "no test runs it", 0.0)
                )
        run_all(tasks, rooms)
    found = [results.by_name[mutant.name] for mutant in mutants]
    text = page(found, f"make test-mutants N={args.count} SEED={args.seed}")
    (OUTPUTS / f"{args.seed}.md").write_text(text)
    print(text)
    return int(any(result.state == "survived" for result in found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", default="", help="modules whose path holds this text")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=MOST_SECONDS,
        help="of tests a mutant, as recorded, without and with ranks",
    )
    parser.add_argument("--again", action="store_true", help="try survivors and timeouts again")
    args = parser.parse_args(argv)
    os.nice(10)
    return campaign(args)


if __name__ == "__main__":
    sys.exit(main())
