"""Train for long with faults at random times, resume after each, and compare with an undisturbed run to the bit.

    python -m tests.soak.run --minutes 30 --seed 1

A round is a training run of two ranks: seven faults, one of each kind, then it goes on for a while to its end; after it
the same steps are trained undisturbed. Stages and intervals take turns from round to round until the time is up. After
each fault: do all ranks end in time, with the error that they should have, and does no process stay?
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.soak.plan import RANKS, Fault, Kind, Round, plan_round
from tests.soak.ranks import ROOT, START_SECONDS, Ranks, SoakError, read_lines
from tests.soak.report import FaultRecord, RoundRecord, Settings, write_report

ERROR_SECONDS = 5.0
"""From a fault until every rank has an error, beside the timeout that has to pass first for some kinds."""
EXIT_SECONDS = 30.0
"""For the interpreters of the ranks to end then, on a machine that does other work too."""
STEPS_AFTER_FAULTS = 40
OUTPUT = ROOT / "outputs" / "soak"


def inject(fault: Fault, ranks: Ranks) -> None:
    """Do it; `Kind.TRUNCATE` begins like `Kind.KILL_ALL`."""
    if fault.kind is Kind.KILL_WORKER:
        os.kill(ranks.worker(fault.rank), signal.SIGKILL)
    elif fault.kind is Kind.STOP_WORKER:
        os.kill(ranks.worker(fault.rank), signal.SIGSTOP)
    elif fault.kind is Kind.KILL_RANK:
        ranks.processes[fault.rank].kill()
    elif fault.kind is Kind.DISK_FULL:
        ranks.processes[fault.rank].send_signal(signal.SIGUSR2)
    else:
        for process in ranks.processes:
            process.send_signal(signal.SIGINT if fault.kind is Kind.INTERRUPT else signal.SIGKILL)


def suffer(fault: Fault, ranks: Ranks, settings: Settings) -> FaultRecord:
    """Wait for the moment, inject the fault, and see to it that all ends as it must.

    Raises:
        SoakError: it does not.
    """
    time.sleep(max(0.0, fault.delay_seconds - (time.monotonic() - ranks.launched if fault.starting else 0.0)))
    if fault.kind is Kind.TRUNCATE:  # there must be another to fall back on
        ranks.wait_until(lambda: len(ranks.checkpoints()) > 1, START_SECONDS, "a second checkpoint")
    record = FaultRecord(fault.kind.value, fault.rank, not ranks.stepped(), ranks.last_step())
    if fault.kind is Kind.DISK_FULL:
        before = [len(ranks.events(rank, "save failed")) for rank in range(RANKS)]
        inject(fault, ranks)
        record.seconds_to_error = ranks.wait_until(
            lambda: all(len(ranks.events(rank, "save failed")) > before[rank] for rank in range(RANKS)),
            settings.group_timeout_seconds,
            "a save that fails on every rank",
        )
        record.error = ranks.events(1 - fault.rank, "save failed")[-1]["error"]
        return record
    inject(fault, ranks)
    waits = {Kind.STOP_WORKER: settings.worker_timeout_seconds}
    waits |= dict.fromkeys((Kind.KILL_RANK, Kind.INTERRUPT), settings.group_timeout_seconds)
    try:
        record.seconds_to_error = ranks.wait_for_error(ERROR_SECONDS + waits.get(fault.kind, 0.0))
    except SoakError:
        if fault.kind is not Kind.KILL_RANK or not record.while_starting:
            raise
        # torch.distributed.new_group waits for a dead rank for half an hour, whatever the group's timeout: this is
        # where a launcher, which has seen a rank die, ends the others.
        record.ended_by_launcher = True
        ranks.processes[1 - fault.rank].kill()
    record.seconds_to_end = record.seconds_to_error + ranks.wait_for_end(EXIT_SECONDS)
    ranks.require_nothing_left()
    record.error = require_error(fault, ranks)
    return record


def require_error(fault: Fault, ranks: Ranks) -> str:
    """Every rank must have failed, with a `WorkerError` if the worker did; returns what the other rank says."""
    for rank in range(RANKS):
        if ranks.processes[rank].returncode == 0:
            raise SoakError(f"after {fault.kind.value}, rank {rank} ended as if nothing had happened")
        if fault.kind in (Kind.KILL_WORKER, Kind.STOP_WORKER) and "WorkerError: " not in ranks.said(rank):
            raise SoakError(f"after {fault.kind.value}, rank {rank} does not know why: {ranks.said(rank)[-1500:]}")
    lines = ranks.said(1 - fault.rank).splitlines()
    return next((line for line in reversed(lines) if "Error: " in line or "KeyboardInterrupt" in line), "")


def truncate_newest(ranks: Ranks, draw: random.Random) -> int:
    """Cut a file of the newest checkpoint; returns its step."""
    newest = ranks.checkpoints()[-1]
    path = draw.choice(sorted((ranks.folder / str(newest)).glob("*.pt")))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return newest


def note_resume(record: FaultRecord, ranks: Ranks) -> None:
    """Wait until training goes on after the fault; what was truncated must have been refused."""
    seconds = ranks.wait_for_first_step()
    if record.kind == Kind.DISK_FULL.value:
        return
    record.seconds_to_resume = seconds
    for rank in range(RANKS):
        (event,) = ranks.events(rank, "resumed")
        record.resumed_from = event["step"]
        record.refused = [refused["step"] for refused in event["refused"]]
        if record.truncated is not None and record.truncated not in record.refused:
            raise SoakError(f"rank {rank} resumed from step {event['step']}, but {record.truncated} was truncated")


def disturbed_run(plan: Round, settings: Settings, folder: Path, record: RoundRecord) -> None:
    """All faults, each with a new launch behind it, and then the end."""
    draw = random.Random(f"{settings.seed} {plan.number}")
    flags = [*common_flags(plan, settings), f"--save-every={settings.save_every}"]
    flags += [f"--pace-seconds={settings.pace_seconds}", f"--worker-timeout-seconds={settings.worker_timeout_seconds}"]
    ranks = Ranks(folder, flags)
    try:
        for fault in plan.faults:
            if not fault.starting:
                ranks.wait_for_first_step()
                if record.faults:
                    note_resume(record.faults[-1], ranks)
            record.faults.append(suffer(fault, ranks, settings))
            if fault.kind is Kind.TRUNCATE:
                record.faults[-1].truncated = truncate_newest(ranks, draw)
            if fault.kind is not Kind.DISK_FULL:
                ranks = Ranks(folder, flags)
        note_resume(record.faults[-1], ranks)
        record.steps = ranks.last_step() + STEPS_AFTER_FAULTS
        ranks.finish(record.steps)
    finally:
        ranks.kill()


def undisturbed_run(plan: Round, settings: Settings, folder: Path, steps: int) -> None:
    """The same steps: no faults, no checkpoints, no pause."""
    ranks = Ranks(folder, common_flags(plan, settings))
    try:
        ranks.finish(steps)
    finally:
        ranks.kill()


def common_flags(plan: Round, settings: Settings) -> list[str]:
    """What both runs are given."""
    flags = [f"--stage={plan.stage}", f"--interval={plan.interval}", f"--rule={settings.rule}"]
    return [*flags, f"--group-timeout-seconds={settings.group_timeout_seconds}"]


def compare(disturbed: Path, undisturbed: Path, record: RoundRecord) -> None:
    """Every recorded loss, those of steps done again included, and the final weights and masters: equal to the bit.

    Raises:
        SoakError: naming the first step that differs.
    """
    for rank in range(RANKS):
        expected = dict(read_lines(undisturbed / f"curve-{rank}.jsonl"))
        recorded = read_lines(disturbed / f"curve-{rank}.jsonl")
        record.losses_compared += len(recorded)
        if wrong := [step for step, bits in recorded if expected.get(step) != bits]:
            raise SoakError(f"rank {rank}: the loss differs from step {min(wrong)} on, at {len(wrong)} places")
        if missing := set(range(1, record.steps + 1)) - {step for step, _ in recorded}:
            raise SoakError(f"rank {rank}: steps {sorted(missing)} were not recorded")
        name = f"final-{rank}.json"
        if (disturbed / name).read_text() != (undisturbed / name).read_text():
            raise SoakError(f"rank {rank}: final weights or masters differ")


def run_round(plan: Round, settings: Settings, folder: Path) -> RoundRecord:
    """One round; what goes wrong is in the record."""
    record = RoundRecord(plan.number, plan.stage, plan.interval)
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    try:
        disturbed_run(plan, settings, disturbed, record)
        undisturbed_run(plan, settings, undisturbed, record.steps)
        compare(disturbed, undisturbed, record)
    except SoakError as error:
        record.failure = str(error)
    else:
        shutil.rmtree(folder)
    return record


def soak(settings: Settings, minutes: float, output: Path) -> list[RoundRecord]:
    """Rounds until the time is up; at least one. What failed stays in `output`."""
    records: list[RoundRecord] = []
    deadline = time.monotonic() + 60 * minutes
    while not records or time.monotonic() < deadline:
        plan = plan_round(settings.seed, len(records), settings.longest_delay_seconds)
        folder = output / f"round-{plan.number}"
        shutil.rmtree(folder, ignore_errors=True)
        records.append(run_round(plan, settings, folder))
        print(f"round {plan.number}: {records[-1].failure or 'equal to the bit'}", flush=True)
    return records


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new round after this time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: any")
    parser.add_argument("--rule", default="predictive", help="one of tests.soak.trainer.RULES")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the report")
    parser.add_argument("--write-docs", action="store_true", help="write docs/soak.md too")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored, by the ranks too then
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # by way of `Ranks.kill`
    settings = Settings(args.seed, args.rule)
    print(f"seed {settings.seed}", flush=True)
    begin = time.monotonic()
    records = soak(settings, args.minutes, args.output)
    text = write_report(records, settings, time.monotonic() - begin, args.output)
    if args.write_docs:
        (ROOT / "docs" / "soak.md").write_text(text)
    print(text)
    return int(any(record.failure for record in records))


if __name__ == "__main__":
    sys.exit(main())
