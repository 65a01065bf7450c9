"""Train for long with faults at random times, resume after each, and compare with an undisturbed
run to the bit.

    python -m tests.soak.run --minutes 30 --seed 1

A round is a training run of two or three ranks that saves every few steps: each fault once, in
random order, on a random rank, after a random time, which may be within a save or a start. Then it
goes on for a while to its end; after it the same steps are trained undisturbed. Stages, numbers of
ranks and forms (8-bit moments, Lion, ...) take turns until the time is up. After each fault: do all
ranks end in time, with the error that they should have, and does no process stay? Suspended ranks
must train on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.soak.trainer import FORMS
from tests.support.paths import ROOT

__all__ = ["Round", "SoakError", "plan_round", "run_round"]

KILL_WORKER, STOP_WORKER, SUSPEND = "kill a worker", "stop a worker", "suspend all processes"
KILL_RANK, KILL_ALL = "kill a rank", "kill all ranks"
SIGNALS = {"interrupt all ranks": signal.SIGINT, "terminate all ranks": signal.SIGTERM}
FAULTS = (KILL_WORKER, STOP_WORKER, SUSPEND, KILL_RANK, KILL_ALL, *SIGNALS)
LONGEST_DELAY, STARTING_FRACTION = 10.0, 0.25
WORKER_TIMEOUT, GROUP_TIMEOUT = 8.0, 10.0
SOON, EXIT_SECONDS, START_SECONDS, FINISH_SECONDS = 15.0, 30.0, 120.0, 900.0
STEPS_AFTER = 40


class SoakError(AssertionError):
    """The run did not do what it must."""


@dataclass(frozen=True)
class Fault:
    """What is done to which rank, and when.

    Attributes:
        starting: whether `delay` counts from the launch of the ranks, else from the first step
            after it.
        delay: seconds.
    """

    kind: str
    rank: int
    starting: bool
    delay: float


@dataclass(frozen=True)
class Round:
    """One training run from its first step on, and its faults in order."""

    number: int
    stage: int
    ranks: int
    form: str
    faults: tuple[Fault, ...]


def plan_round(seed: int, number: int, longest_delay: float = LONGEST_DELAY) -> Round:
    """Round `number` (from 0): a pure function of its arguments. Six rounds see each stage with
    each number of ranks; each stage sees another form in each of its rounds."""
    draw, ranks = random.Random(seed * 1_000_003 + number), (2, 3)[number % 2]
    faults = [
        Fault(
            kind,
            draw.randrange(ranks),
            draw.random() < STARTING_FRACTION,
            draw.uniform(0, longest_delay),
        )
        for kind in draw.sample(FAULTS, len(FAULTS))
    ]
    form = list(FORMS)[(number // 3 + seed) % len(FORMS)]
    return Round(number, 1 + (number + 1) % 3, ranks, form, tuple(faults))


class Ranks:
    """One launch of `tests.soak.trainer` in `folder`, which goes on from what is there. Everything
    that it starts carries a mark in its environment."""

    def __init__(self, folder: Path, plan: Round, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.mark, self.all = folder, uuid.uuid4().hex, range(plan.ranks)
        self._before = [len(self.curve(rank)) for rank in self.all]
        command = [sys.executable, "-m", "tests.soak.trainer", "--folder", str(folder), *flags]
        command += [f"--stage={plan.stage}", f"--form={plan.form}"]
        command += [f"--worker-timeout-seconds={WORKER_TIMEOUT}"]
        command += [f"--group-timeout-seconds={GROUP_TIMEOUT}"]
        self.processes = [self._launch(rank, command) for rank in self.all]

    def _launch(self, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(len(self.all))),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "SOAK_RENDEZVOUS": str(self.folder / f"rendezvous-{self.mark}"),
            "SOAK_MARK": self.mark,
        }
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, rank: int) -> Path:
        return self.folder / f"log-{self.mark}-{rank}.txt"

    def said(self, rank: int) -> str:
        """What the rank has printed."""
        return self._log(rank).read_text(errors="replace")

    def curve(self, rank: int) -> list[list[Any]]:
        """[step, loss bits] of every step, earlier launches' included."""
        return read_lines(self.folder / f"curve-{rank}.jsonl")

    def steps(self) -> int:
        """Steps that every rank has made in this launch."""
        return min(len(self.curve(rank)) - self._before[rank] for rank in self.all)

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def failed(self, rank: int) -> bool:
        """Whether the rank has printed an exception, or has ended."""
        return self.processes[rank].poll() is not None or "Traceback (most" in self.said(rank)

    def wait_until(self, happened: Callable[[], Any], seconds: float, what: str) -> None:
        """Raise `SoakError` if the time is up, or if the ranks end and it has not happened."""
        deadline = time.monotonic() + seconds
        while not happened():
            ended = self.has_ended()
            if time.monotonic() > deadline or (ended and not happened()):
                why = "the ranks ended before" if ended else f"not within {seconds:g} s"
                said = [f"rank {rank} said: {self.said(rank)[-1500:]}" for rank in self.all]
                raise SoakError(f"{what}: {why}; {'; '.join(said)}")
            time.sleep(0.02)

    def worker(self, rank: int) -> int:
        """Process id of the rank's worker, once there is one."""

        def found() -> list[int]:
            with suppress(psutil.Error):
                children = psutil.Process(self.processes[rank].pid).children()
                return [c.pid for c in children if "zenflow.worker.main" in " ".join(c.cmdline())]
            return []

        self.wait_until(found, START_SECONDS, "the start of a worker")
        return found()[0]

    def finish(self, last_step: int) -> None:
        """Let the run end after `last_step`."""
        (self.folder / "last-step").write_text(str(last_step))
        self.wait_until(self.has_ended, FINISH_SECONDS, "the end of the run")
        if any(process.returncode for process in self.processes):
            said = [f"rank {rank} said: {self.said(rank)[-1500:]}" for rank in self.all]
            raise SoakError(f"ranks failed before the end: {'; '.join(said)}")

    def alive(self) -> set[int]:
        """All that this launch has started and that is still there."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                marked = process.environ().get("SOAK_MARK") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    def kill(self) -> None:
        """End whatever is left."""
        send(signal.SIGKILL, self.alive())
        for process in self.processes:
            process.wait()


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def read_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- faults ----------------------------------------------------------------------------------------


def suffer(fault: Fault, ranks: Ranks) -> None:
    """Bring a fault about at its time, and see to it that the run takes it as it must."""
    if not fault.starting:
        ranks.wait_until(ranks.steps, START_SECONDS, "the first step after a launch")
    time.sleep(fault.delay)
    if fault.kind == SUSPEND:
        suspend(ranks)
        return
    waits, pids = 0.0, [process.pid for process in ranks.processes]
    if fault.kind in (KILL_WORKER, STOP_WORKER):
        stops = fault.kind == STOP_WORKER
        waits = 2 * WORKER_TIMEOUT * stops
        send(signal.SIGSTOP if stops else signal.SIGKILL, [ranks.worker(fault.rank)])
    elif fault.kind == KILL_RANK:
        waits = GROUP_TIMEOUT
        send(signal.SIGKILL, [pids[fault.rank]])
    else:
        waits = GROUP_TIMEOUT
        send(SIGNALS.get(fault.kind, signal.SIGKILL), pids)
    try:
        ranks.wait_until(
            lambda: all(map(ranks.failed, ranks.all)), SOON + waits, f"an error after {fault.kind}"
        )
    except SoakError:
        if fault.kind != KILL_RANK or ranks.steps():
            raise
        # torch.distributed.new_group waits for a dead rank, whatever the timeout of the group. A
        # launcher, which has seen a rank die, ends the others here.
        send(signal.SIGKILL, [each.pid for each in ranks.processes if each.poll() is None])
    ranks.wait_until(ranks.has_ended, EXIT_SECONDS, f"the end of the ranks after {fault.kind}")
    deadline = time.monotonic() + 2.0
    while left := ranks.alive():
        if time.monotonic() > deadline:
            raise SoakError(f"after {fault.kind}, processes {left} are still there")
        time.sleep(0.02)
    for rank in ranks.all:
        if ranks.processes[rank].returncode == 0:
            raise SoakError(f"after {fault.kind}, rank {rank} ended as if nothing had happened")
        knows = fault.kind not in (KILL_WORKER, STOP_WORKER) or "WorkerError: " in ranks.said(rank)
        if not knows:
            raise SoakError(f"after {fault.kind}, rank {rank} does not know why")


def suspend(ranks: Ranks) -> None:
    """Everything stands still for longer than the worker's timeout; then all ranks train on."""
    pids = {process.pid for process in ranks.processes}
    send(signal.SIGSTOP, ranks.alive() - pids)
    time.sleep(0.5)  # so that the ranks wait for their workers then
    send(signal.SIGSTOP, pids)
    time.sleep(0.1)
    send(signal.SIGSTOP, ranks.alive())  # workers that have only just been started
    time.sleep(1.5 * WORKER_TIMEOUT)
    before = ranks.steps()
    send(signal.SIGCONT, pids)
    send(signal.SIGCONT, ranks.alive())
    ranks.wait_until(
        lambda: ranks.steps() >= before + 12 or any(map(ranks.failed, ranks.all)),
        START_SECONDS,
        "steps after a suspension",
    )
    if any(map(ranks.failed, ranks.all)):
        raise SoakError(f"after a suspension: {[ranks.said(rank)[-1500:] for rank in ranks.all]}")


# -- rounds ----------------------------------------------------------------------------------------


def run_round(plan: Round, folder: Path, save_every: int = 20, pace: float = 0.05) -> int:
    """One round, in an empty folder; returns how many losses were compared."""
    here, there = folder / "disturbed", folder / "undisturbed"
    flags = [f"--save-every={save_every}", f"--pace-seconds={pace}"]
    ranks = Ranks(here, plan, *flags)
    try:
        for fault in plan.faults:
            suffer(fault, ranks)
            if fault.kind != SUSPEND:
                ranks = Ranks(here, plan, *flags)
        ranks.wait_until(ranks.steps, START_SECONDS, "the first step after the last launch")
        steps = max(step for step, _ in ranks.curve(0)) + STEPS_AFTER
        ranks.finish(steps)
    finally:
        ranks.kill()
    ranks = Ranks(there, plan)
    try:
        ranks.finish(steps)
    finally:
        ranks.kill()
    return sum(compared(here, there, rank, steps) for rank in range(plan.ranks))


def compared(here: Path, there: Path, rank: int, steps: int) -> int:
    """Every loss that a rank has recorded, those of steps done again included, and the final
    weights and masters: equal to the bit. How many losses that were."""
    expected = dict(read_lines(there / f"curve-{rank}.jsonl"))
    recorded = read_lines(here / f"curve-{rank}.jsonl")
    if wrong := [step for step, bits in recorded if expected.get(step) != bits]:
        raise SoakError(f"rank {rank}: {len(wrong)} losses differ, from step {min(wrong)} on")
    if missing := set(range(1, steps + 1)) - {step for step, _ in recorded}:
        raise SoakError(f"rank {rank}: steps {sorted(missing)} were not recorded")
    if (here / f"final-{rank}").read_text() != (there / f"final-{rank}").read_text():
        raise SoakError(f"rank {rank}: final weights or masters differ")
    return len(recorded)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new round after it")
    parser.add_argument("--round", type=int, help="only this round of the seed")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "soak")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    # in a background job it is ignored, by the ranks too then
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # by way of `Ranks.kill`
    begin, number, losses, failed = time.monotonic(), args.round or 0, 0, 0
    while True:
        plan, folder = plan_round(args.seed, number), args.output / f"round-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            losses += run_round(plan, folder)
            shutil.rmtree(folder)
            says = "equal to the bit"
        except SoakError as error:
            says, failed = f"FAILED, see {folder}: {error}", failed + 1
        print(
            f"seed {args.seed}, round {number}: stage {plan.stage}, {plan.ranks} ranks, "
            f"{plan.form}: {says}",
            flush=True,
        )
        number += 1
        if args.round is not None or time.monotonic() - begin > 60 * args.minutes:
            break
    print(f"{failed} of {number - (args.round or 0)} rounds failed; {losses:,} losses compared")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
