"""Train for long with faults at random times, resume after each, and compare with an undisturbed
run to the bit.

    python -m tests.soak.run --minutes 30 --seed 1

A round is a training run of two or three ranks: one fault of each kind, then it goes on for a while
to its end; after it the same steps are trained undisturbed. Stages, numbers of ranks and forms
(moments of 8 bits, Lion, ...) take turns from round to round until the time is up. After each
fault: do all ranks end in time, with the error that they should have, and does no process stay? Or,
if the run must survive the fault: does it?
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from tests.soak.plan import FORMS, Kind, Round, plan_round
from tests.soak.ranks import ROOT, Ranks, SoakError, read_lines
from tests.soak.report import RoundRecord, Settings, write_report
from tests.soak.suffer import note_resume, suffer, truncate_newest

STEPS_AFTER_FAULTS = 40
OUTPUT = ROOT / "outputs" / "soak"


def disturbed_run(plan: Round, settings: Settings, folder: Path, record: RoundRecord) -> None:
    """All faults, each with a new launch behind it if it ended the ranks, and then the end."""
    draw = random.Random(f"{settings.seed} {plan.number}")
    flags = [*common_flags(plan, settings), f"--save-every={settings.save_every}"]
    flags += [
        f"--pace-seconds={settings.pace_seconds}",
        f"--worker-timeout-seconds={settings.worker_timeout_seconds}",
    ]

    def launch() -> Ranks:
        return Ranks(folder, plan.ranks, flags, settings.start_seconds)

    ranks = launch()
    try:
        for fault in plan.faults:
            if not fault.starting:
                ranks.wait_for_first_step()
                if record.faults:
                    note_resume(record.faults[-1], ranks)
            record.faults.append(suffer(fault, ranks, settings))
            if fault.kind is Kind.TRUNCATE:
                record.faults[-1].truncated = truncate_newest(ranks, draw)
            if fault.kind.ends_ranks:
                ranks = launch()
        note_resume(record.faults[-1], ranks)
        record.steps = ranks.last_step() + STEPS_AFTER_FAULTS
        ranks.finish(record.steps)
    finally:
        ranks.kill()


def undisturbed_run(plan: Round, settings: Settings, folder: Path, steps: int) -> None:
    """The same steps: no faults, no checkpoints, no pause."""
    ranks = Ranks(folder, plan.ranks, common_flags(plan, settings), settings.start_seconds)
    try:
        ranks.finish(steps)
    finally:
        ranks.kill()


def common_flags(plan: Round, settings: Settings) -> list[str]:
    """What both runs are given."""
    flags = [
        f"--stage={plan.stage}",
        f"--form={settings.form or plan.form}",
    ]
    return [*flags, f"--group-timeout-seconds={settings.group_timeout_seconds}"]


def compare(disturbed: Path, undisturbed: Path, record: RoundRecord) -> None:
    """Every recorded loss, those of steps done again included, and the final weights and masters:
    equal to the bit.

    Raises:
        SoakError: naming the first step that differs.
    """
    for rank in range(record.ranks):
        expected = dict(read_lines(undisturbed / f"curve-{rank}.jsonl"))
        recorded = read_lines(disturbed / f"curve-{rank}.jsonl")
        record.losses_compared += len(recorded)
        if wrong := [step for step, bits in recorded if expected.get(step) != bits]:
            raise SoakError(
                f"rank {rank}: the loss differs from step {min(wrong)} on, at {len(wrong)} places"
            )
        if missing := set(range(1, record.steps + 1)) - {step for step, _ in recorded}:
            raise SoakError(f"rank {rank}: steps {sorted(missing)} were not recorded")
        name = f"final-{rank}.json"
        if (disturbed / name).read_text() != (undisturbed / name).read_text():
            raise SoakError(f"rank {rank}: final weights or masters differ")


def run_round(plan: Round, settings: Settings, folder: Path) -> RoundRecord:
    """One round; what goes wrong is in the record."""
    record = RoundRecord(plan.number, plan.stage, plan.ranks, settings.form or plan.form)
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


def soak(
    settings: Settings, minutes: float, output: Path, only: int | None = None
) -> list[RoundRecord]:
    """Rounds until the time is up, at least one; or the round `only`. What failed stays in
    `output`."""
    records: list[RoundRecord] = []
    deadline = time.monotonic() + 60 * minutes
    while not records or (only is None and time.monotonic() < deadline):
        plan = plan_round(
            settings.seed, len(records) if only is None else only, settings.longest_delay_seconds
        )
        plan = replace(
            plan, faults=tuple(f for f in plan.faults if f.kind.value not in settings.without)
        )
        folder = output / f"round-{plan.number}"
        shutil.rmtree(folder, ignore_errors=True)
        records.append(run_round(plan, settings, folder))
        print(f"round {plan.number}: {records[-1].failure or 'equal to the bit'}", flush=True)
    return records


def parse_args() -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="begin no new round after this time"
    )
    parser.add_argument(
        "--round", type=int, help="only this round of the seed, to repeat what failed"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the report")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: any"
    )
    parser.add_argument("--form", choices=FORMS, help="of every round; default: each in turn")
    parser.add_argument(
        "--without", nargs="*", default=(), choices=[kind.value for kind in Kind], help="left out"
    )
    parser.add_argument("--save-every", type=int, default=Settings.save_every, help="steps")
    for name in (field.name for field in fields(Settings) if field.name.endswith("_seconds")):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=getattr(Settings, name)
        )
    args = parser.parse_args()
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return args, Settings(**{**values, "without": tuple(args.without)})


def main() -> int:
    args, settings = parse_args()
    # in a background job it is ignored, by the ranks too then
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # by way of `Ranks.kill`
    print(f"seed {settings.seed}", flush=True)
    begin = time.monotonic()
    records = soak(settings, args.minutes, args.output, args.round)
    text = write_report(records, settings, time.monotonic() - begin, args.output)
    print(text)
    return int(any(record.failure for record in records))


if __name__ == "__main__":
    sys.exit(main())
