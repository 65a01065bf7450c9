"""One fault of a soak: bring it about at its time, and see to it that the run takes it as it
must."""

from __future__ import annotations

import json
import os
import random
import signal
import time

from tests.soak.plan import Fault, Kind
from tests.soak.ranks import Ranks, SoakError, send
from tests.soak.report import FaultRecord, Settings

__all__ = ["note_resume", "suffer", "truncate_newest"]

SETTLED_STEPS = 12
"""Steps after which a run that was suspended has certainly waited for its workers."""
STEPS_AHEAD = 20
"""Of the ranks, which must all read a request before its step."""
ENDED_IN_SAVE = (-signal.SIGKILL, -signal.SIGXFSZ)


def suffer(fault: Fault, ranks: Ranks, settings: Settings) -> FaultRecord:
    """Wait for the moment, inject the fault, and see to it that all goes as it must.

    Raises:
        SoakError: it does not.
    """
    time.sleep(
        max(
            0.0,
            fault.delay_seconds - (time.monotonic() - ranks.launched if fault.starting else 0.0),
        )
    )
    if fault.kind is Kind.TRUNCATE:  # there must be another to fall back on
        ranks.wait_until(
            lambda: len(ranks.checkpoints()) > 1, settings.start_seconds, "a second checkpoint"
        )
    record = FaultRecord(fault.kind.value, fault.rank, not ranks.steps(), ranks.last_step())
    if fault.kind is Kind.SUSPEND:
        suspend(record, ranks, settings)
    elif fault.kind is Kind.DISK_FULL:
        fill_disk(record, ranks, settings)
    elif fault.kind is Kind.DROP_ENGINE:
        drop_engine(record, ranks, settings)
    else:
        end_ranks(fault, record, ranks, settings)
    return record


def suspend(record: FaultRecord, ranks: Ranks, settings: Settings) -> None:
    """Everything stands still for longer than the worker's timeout; then all ranks train on."""
    ranks.stop()
    time.sleep(settings.suspended_seconds)
    before = ranks.steps()
    ranks.go_on()

    def happened(steps: int) -> bool:
        return ranks.steps() >= before + steps or any(map(ranks.failed, ranks.all))

    record.seconds_to_resume = ranks.wait_until(
        lambda: happened(1), settings.start_seconds, "a step after suspension"
    )
    ranks.wait_until(
        lambda: happened(SETTLED_STEPS), settings.start_seconds, "steps after suspension"
    )
    for rank in filter(ranks.failed, ranks.all):
        raise SoakError(f"after a suspension rank {rank} failed: {ranks.said(rank)[-1500:]}")


def fill_disk(record: FaultRecord, ranks: Ranks, settings: Settings) -> None:
    """The next save fails on every rank, because one has no room."""
    before = [len(ranks.events(rank, "save failed")) for rank in ranks.all]
    ranks.ask(record.rank, "disk-full", 1)
    record.seconds_to_error = ranks.wait_until(
        lambda: all(len(ranks.events(rank, "save failed")) > before[rank] for rank in ranks.all),
        settings.start_seconds,
        "a save that fails on every rank",
    )
    record.error = ranks.events(other_than(record.rank), "save failed")[-1]["error"]


def drop_engine(record: FaultRecord, ranks: Ranks, settings: Settings) -> None:
    """Every rank forgets its engine and builds another; nothing of the first may be left."""
    before = len(ranks.events(0, "dropped"))
    step = ranks.last_step() + STEPS_AHEAD
    for rank in ranks.all:
        ranks.ask(rank, "drop-engine", step)
    ranks.wait_until(
        lambda: all(len(ranks.events(rank, "dropped")) > before for rank in ranks.all),
        settings.start_seconds,
        f"new engines after step {step}",
    )
    for rank in ranks.all:
        event = ranks.events(rank, "dropped")[-1]
        record.seconds_to_resume = max(record.seconds_to_resume or 0.0, event["seconds"])
        if event["between"]["children"] or event["before"] != event["after"]:
            raise SoakError(f"rank {rank}: a dropped engine left something: {json.dumps(event)}")
    record_resume(record, ranks)


def end_ranks(fault: Fault, record: FaultRecord, ranks: Ranks, settings: Settings) -> None:
    """A fault that ends every rank in time, with an error, and leaves no process."""
    inject(fault, ranks, settings)
    # twice: the run might have been suspended
    waits = {Kind.STOP_WORKER: 2 * settings.worker_timeout_seconds}
    waits |= dict.fromkeys(
        (Kind.KILL_RANK, Kind.KILL_IN_SAVE, Kind.INTERRUPT), settings.group_timeout_seconds
    )
    try:
        record.seconds_to_error = ranks.wait_for_error(
            settings.error_seconds + waits.get(fault.kind, 0.0)
        )
    except SoakError:
        if fault.kind is not Kind.KILL_RANK or not record.while_starting:
            raise
        # torch.distributed.new_group waits for a dead rank, whatever the timeout of the group. A
        # launcher, which has seen a rank die, ends the others here.
        record.ended_by_launcher = True
        begin = time.monotonic()
        send(signal.SIGKILL, [process.pid for process in ranks.processes if process.poll() is None])
        record.seconds_to_error = (
            settings.error_seconds + waits[fault.kind] + time.monotonic() - begin
        )
    record.seconds_to_end = record.seconds_to_error + ranks.wait_for_end(settings.exit_seconds)
    ranks.require_nothing_left()
    record.error = require_error(fault, ranks)


def inject(fault: Fault, ranks: Ranks, settings: Settings) -> None:
    """Do it; `Kind.TRUNCATE` begins like `Kind.KILL_ALL`."""
    signals = {Kind.INTERRUPT: signal.SIGINT, Kind.TERMINATE: signal.SIGTERM}
    if fault.kind is Kind.KILL_WORKER:
        os.kill(ranks.worker(fault.rank), signal.SIGKILL)
    elif fault.kind is Kind.STOP_WORKER:
        os.kill(ranks.worker(fault.rank), signal.SIGSTOP)
    elif fault.kind is Kind.KILL_RANK:
        ranks.processes[fault.rank].kill()
    elif fault.kind is Kind.KILL_IN_SAVE:
        ranks.ask(fault.rank, "kill-in-save", fault.moment)
        ended = ranks.processes[fault.rank].poll
        ranks.wait_until(
            lambda: ended() is not None, settings.start_seconds, "the death of a rank in a save"
        )
    else:
        for process in ranks.processes:
            process.send_signal(signals.get(fault.kind, signal.SIGKILL))


def require_error(fault: Fault, ranks: Ranks) -> str:
    """Every rank must have failed, with a `WorkerError` if the worker did; returns what another
    rank says."""
    for rank in ranks.all:
        if ranks.processes[rank].returncode == 0:
            raise SoakError(
                f"after {fault.kind.value}, rank {rank} ended as if nothing had happened"
            )
        if fault.kind in (Kind.KILL_WORKER, Kind.STOP_WORKER) and "WorkerError: " not in ranks.said(
            rank
        ):
            raise SoakError(
                f"after {fault.kind.value}, rank {rank} does not know why: "
                f"{ranks.said(rank)[-1500:]}"
            )
    if (
        fault.kind is Kind.KILL_IN_SAVE
        and ranks.processes[fault.rank].returncode not in ENDED_IN_SAVE
    ):
        raise SoakError(
            f"rank {fault.rank} was not killed but said {ranks.said(fault.rank)[-1500:]}"
        )
    lines = ranks.said(other_than(fault.rank)).splitlines()
    return next(
        (line for line in reversed(lines) if "Error: " in line or "KeyboardInterrupt" in line), ""
    )


def other_than(rank: int) -> int:
    """A rank that is not `rank`."""
    return int(rank == 0)


def truncate_newest(ranks: Ranks, draw: random.Random) -> str:
    """Cut a file of ``rolling`` or of the newest numbered checkpoint; returns its tag."""
    tag = draw.choice(
        [
            str(ranks.checkpoints()[-1]),
            *(["rolling"] if (ranks.folder / "rolling").exists() else []),
        ]
    )
    path = draw.choice(sorted((ranks.folder / tag).glob("*.pt")))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return tag


def note_resume(record: FaultRecord, ranks: Ranks) -> None:
    """Wait until training goes on after the fault; what it did to checkpoints must have been
    noticed."""
    seconds = ranks.wait_for_first_step()
    if not Kind(record.kind).ends_ranks:
        return
    record.seconds_to_resume = seconds
    record_resume(record, ranks)
    if record.truncated is not None and record.truncated not in record.refused:
        newer = record.truncated.isdigit() and (record.resumed_from or 0) > int(record.truncated)
        if not newer:
            raise SoakError(
                f"resumed from {record.resumed_tag!r}, but {record.truncated!r} was truncated"
            )
    if record.kind == Kind.KILL_IN_SAVE.value:

        def saved(rank: int) -> bool:
            return any(event["tag"] == "rolling" for event in ranks.events(rank, "saved"))

        ranks.wait_until(
            lambda: all(map(saved, ranks.all)),
            ranks.start_seconds,
            "another save under the tag in which a rank was killed",
        )


def record_resume(record: FaultRecord, ranks: Ranks) -> None:
    """Take over what the ranks say that they have resumed from, which must be the same."""
    events = [ranks.events(rank, "resumed")[-1] for rank in ranks.all]
    found = {(event["step"], event["tag"], event["rolling"]) for event in events}
    if len(found) > 1:
        raise SoakError(f"the ranks resumed from different checkpoints: {found}")
    ((record.resumed_from, record.resumed_tag, record.rolling),) = found
    record.refused = sorted({refused["tag"] for event in events for refused in event["refused"]})
