"""What a soak found, as records, JSON and Markdown."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.perf.report import provenance
from tests.soak.plan import Kind

__all__ = ["FaultRecord", "RoundRecord", "Settings", "write_report"]


@dataclass(frozen=True)
class Settings:
    """What a soak is made of."""

    seed: int
    form: str | None = None
    """Of every round; None: the forms take turns."""
    save_every: int = 20
    pace_seconds: float = 0.05
    """Sleep in every step, in place of a device."""
    worker_timeout_seconds: float = 6.0
    group_timeout_seconds: float = 20.0
    longest_delay_seconds: float = 6.0
    """Of a fault after the first step."""
    error_seconds: float = 5.0
    """From a fault until every rank has an error, beside the timeout that has to pass first for
    some kinds."""
    exit_seconds: float = 30.0
    """For the interpreters of the ranks to end then, on a machine that does other work too."""
    start_seconds: float = 120.0
    """For a launch until its first step, and for anything that needs a few dozens of steps."""
    without: tuple[str, ...] = ()
    """Kinds that are left out."""

    @property
    def suspended_seconds(self) -> float:
        """How long all processes are suspended: longer than the worker's timeout, shorter than the
        group's."""
        return self.worker_timeout_seconds + 2.0


@dataclass
class FaultRecord:
    """What one fault did."""

    kind: str
    rank: int
    while_starting: bool
    step: int
    seconds_to_error: float | None = None
    """Until every rank had raised, if it could; None: no rank had to."""
    seconds_to_end: float | None = None
    """Until every rank had ended; None: they train on."""
    ended_by_launcher: bool = False
    """Other ranks waited in torch for the one that had died, and were killed as a launcher does."""
    error: str = ""
    """As a rank on which it did not happen had it, if it could tell."""
    truncated: str | None = None
    """Tag of the checkpoint that was cut."""
    seconds_to_resume: float | None = None
    """From the launch, or what comes in its place, to the first step; None: the next fault came
    before it."""
    resumed_from: int | None = None
    resumed_tag: str | None = None
    rolling: int | None = None
    """Step of the checkpoint ``rolling``; None: there was none, or it was refused."""
    refused: list[str] = field(default_factory=list)
    """Tags of checkpoints that could not be read."""


@dataclass
class RoundRecord:
    """What one round came to."""

    number: int
    stage: int
    interval: int
    ranks: int
    form: str
    steps: int = 0
    losses_compared: int = 0
    """On all ranks, those of steps done again after a resume included."""
    faults: list[FaultRecord] = field(default_factory=list)
    failure: str | None = None


def write_report(
    records: list[RoundRecord], settings: Settings, seconds: float, folder: Path
) -> str:
    """Write ``soak.json`` and ``soak.md`` to `folder`; returns the latter's text."""
    folder.mkdir(parents=True, exist_ok=True)
    text = as_markdown(records, settings, seconds)
    values = {"provenance": provenance(), "settings": asdict(settings), "seconds": seconds}
    values["rounds"] = [asdict(record) for record in records]
    (folder / "soak.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "soak.md").write_text(text)
    return text


def as_markdown(records: list[RoundRecord], settings: Settings, seconds: float) -> str:
    """The report."""
    faults = [fault for record in records for fault in record.faults]
    failed = [record for record in records if record.failure]
    origin = provenance()
    versions = ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
    verdict = f"FAILED in {len(failed)} of {len(records)} rounds" if failed else "passed"
    lines = [
        "# Soak: faults at random times",
        "",
        f"**{verdict}**: {seconds / 60:.0f} minutes, {len(records)} rounds, {len(faults)} faults, "
        f"{sum(record.steps for record in records):,} steps, "
        f"{sum(record.losses_compared for record in records):,} losses compared with an "
        f"undisturbed run, to the bit.",
        "",
        "Two or three ranks train with ZenFlow overlapped. "
        "A round is one run with each kind of fault once, in random",
        "order, on a random rank, after a random time, "
        "some of them while the ranks start; all drawn from the seed.",
        "Ranks that ended are started again and resume "
        "from the newest checkpoint that can be read. Every recorded",
        "loss, including replayed steps, and the final weights and masters must match an "
        "uninterrupted run without",
        f"checkpoints bitwise. Every {settings.save_every} steps the run saves twice: a",
        "checkpoint with a number as its tag, "
        "and half-way to the next one a checkpoint with the tag `rolling`, which",
        "replaces the one before. "
        f"A pause of {1e3 * settings.pace_seconds:.0f} ms per step stands in for a device",
        "(a simulation).",
        *([f"Left out: {', '.join(settings.without)}."] if settings.without else []),
        "",
        "```bash",
        origin["command"],
        "```",
        "",
        f"Seed {settings.seed}. {origin['cpu']}, "
        f"{origin['cores']} cores shared with other work, no accelerator;",
        f"{versions}; commit {origin['commit']}, {origin['date']}.",
        "",
        "| fault | number | of these while starting | until every rank had an error, s | until "
        "every rank had ended, s | until the first step again, s |",
        "|---|---|---|---|---|---|",
        *(
            _kind_line(kind, [fault for fault in faults if fault.kind == kind.value])
            for kind in Kind
        ),
        "",
        "Seconds: median (longest).",
        "",
        *_notes(faults, settings),
        "",
        "| round | stage | interval | ranks | form | steps "
        "| faults | losses compared | equal to the bit |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.number} | {r.stage} | {r.interval} | {r.ranks} | {r.form} | {r.steps:,} | "
            f"{len(r.faults)} | {r.losses_compared:,} | {'no' if r.failure else 'yes'} |"
            for r in records
        ),
        "",
        "*On the host*: parameters at stage 3, sums of gradients at stage 2, "
        "transfers inside of the step at stage 1.",
        "*Half on the host*: `offload_optimizer.ratio` 0.5.",
        *(f"\nRound {record.number}: {record.failure}" for record in failed),
    ]
    return "\n".join(lines) + "\n"


def _notes(faults: list[FaultRecord], settings: Settings) -> list[str]:
    """What the table of faults does not say."""
    by_launcher = sum(fault.ended_by_launcher for fault in faults)
    in_save = [fault for fault in faults if fault.kind == Kind.KILL_IN_SAVE.value]
    refused = sum("rolling" in fault.refused for fault in in_save)
    return [
        f"- *{Kind.SUSPEND.value}*: for {settings.suspended_seconds:g} s; "
        "then the same processes train on, without an",
        f"  error. The optimizer process's timeout is {settings.worker_timeout_seconds:g} s, "
        f"which is also how long it",
        f"  takes to notice a stopped one. The process group's timeout is "
        f"{settings.group_timeout_seconds:g} s.",
        f"- *{Kind.DISK_FULL.value}*: "
        "the save fails on every rank, and the same processes train on.",
        f"- *{Kind.DROP_ENGINE.value}*: every rank forgets "
        "its engine without `destroy()`, builds another in the same",
        "  process and resumes. Afterwards it holds as many children, "
        "descriptors and shared memory as before; except",
        "  at stage 3, where DeepSpeed keeps every optimizer, "
        "and so its masters, until the process ends.",
        f"- *{Kind.KILL_IN_SAVE.value}*: "
        f"at a random file operation of a save that replaces `rolling`. In {refused}",
        f"  of {len(in_save)} cases `rolling` was then refused as not whole; "
        "otherwise it was the old or the new one.",
        "  The next save under that tag worked.",
        "- Between error and end Python takes down an interpreter, beside other work on the "
        "machine. 2 s after an end",
        "  no process was left.",
        "- A launcher ends all ranks if one dies. "
        f"The soak had to do so {by_launcher} times, because torch waits for",
        "  a rank that died while it started.",
    ]


def _kind_line(kind: Kind, faults: list[FaultRecord]) -> str:
    errors = [fault.seconds_to_error for fault in faults if fault.seconds_to_error is not None]
    ends = [fault.seconds_to_end for fault in faults if fault.seconds_to_end is not None]
    resumes = [fault.seconds_to_resume for fault in faults if fault.seconds_to_resume is not None]
    starting = sum(fault.while_starting for fault in faults)
    times = " | ".join(map(_typical, (errors, ends, resumes)))
    return f"| {kind.value} | {len(faults)} | {starting} | {times} |"


def _typical(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"
