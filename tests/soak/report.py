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
    rule: str = "predictive"
    save_every: int = 20
    pace_seconds: float = 0.05
    """Sleep in every step, in place of a device."""
    worker_timeout_seconds: float = 6.0
    group_timeout_seconds: float = 20.0
    longest_delay_seconds: float = 8.0
    """Of a fault after the first step."""


@dataclass
class FaultRecord:
    """What one fault did."""

    kind: str
    rank: int
    while_starting: bool
    step: int
    seconds_to_error: float = 0.0
    """Until every rank had raised, if it could."""
    seconds_to_end: float | None = None
    """Until every rank had ended; None: they train on."""
    ended_by_launcher: bool = False
    """The other rank waited in torch for the one that had died, and was killed as a launcher does."""
    error: str = ""
    """As the rank on which it did not happen had it, if it could tell."""
    truncated: int | None = None
    """Step of the checkpoint that was cut."""
    seconds_to_resume: float | None = None
    """From the launch to the first step; None: the next fault came before it, or nothing had ended."""
    resumed_from: int | None = None
    refused: list[int] = field(default_factory=list)
    """Steps of checkpoints that could not be read."""


@dataclass
class RoundRecord:
    """What one round came to."""

    number: int
    stage: int
    interval: int
    steps: int = 0
    losses_compared: int = 0
    """On both ranks, those of steps done again after a resume included."""
    faults: list[FaultRecord] = field(default_factory=list)
    failure: str | None = None


def write_report(records: list[RoundRecord], settings: Settings, seconds: float, folder: Path) -> str:
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
    by_launcher = sum(fault.ended_by_launcher for fault in faults)
    origin = provenance()
    versions = ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
    verdict = f"FAILED in {len(failed)} of {len(records)} rounds" if failed else "passed"
    lines = [
        "# Soak: faults at random times",
        "",
        f"**{verdict}**: {seconds / 60:.0f} minutes, {len(records)} rounds, {len(faults)} faults, "
        f"{sum(record.steps for record in records):,} steps, "
        f"{sum(record.losses_compared for record in records):,} losses compared with an undisturbed run, to the bit.",
        "",
        "Two ranks train with ZenFlow overlapped. A round is one run: each kind of fault once, in random order, on a",
        "random rank, after a random time, some of them while the ranks start; all drawn from the seed. Ranks that",
        "ended are started again and resume from the newest checkpoint that can be read. In the end every loss that",
        "was recorded, that of steps done again included, and the final weights and masters must be those of a run",
        f"that nobody disturbed and that never saved. Rule: {settings.rule}; a checkpoint every {settings.save_every}",
        f"steps; a pause of {1e3 * settings.pace_seconds:.0f} ms in each step in place of a device.",
        "",
        "```bash",
        origin["command"],
        "```",
        "",
        f"Seed {settings.seed}. {origin['cpu']}, {origin['cores']} cores shared with other work, no accelerator;",
        f"{versions}; commit {origin['commit']}, {origin['date']}.",
        "",
        "| fault | number | of these while starting | until every rank had an error, s | until every rank had ended, s "
        "| from launch to first step again, s |",
        "|---|---|---|---|---|---|",
        *(_kind_line(kind, [fault for fault in faults if fault.kind == kind.value]) for kind in Kind),
        "",
        "Seconds: median (longest). After a full disk training goes on in the same processes. A stopped worker is",
        f"noticed after its timeout, {settings.worker_timeout_seconds:g} s. Between error and end Python takes down an",
        "interpreter, beside other work on the machine. No process was left 2 s later, after any fault.",
        f"Ended as a launcher does, because torch waits for a rank that died while it started: {by_launcher}.",
        "",
        "| round | stage | interval | steps | faults | losses compared | equal to the bit |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r.number} | {r.stage} | {r.interval} | {r.steps:,} | {len(r.faults)} | {r.losses_compared:,} | "
            f"{'no' if r.failure else 'yes'} |"
            for r in records
        ),
        *(f"\nRound {record.number}: {record.failure}" for record in failed),
    ]
    return "\n".join(lines) + "\n"


def _kind_line(kind: Kind, faults: list[FaultRecord]) -> str:
    errors = [fault.seconds_to_error for fault in faults]
    ends = [fault.seconds_to_end for fault in faults if fault.seconds_to_end is not None]
    resumes = [fault.seconds_to_resume for fault in faults if fault.seconds_to_resume is not None]
    starting = sum(fault.while_starting for fault in faults)
    times = " | ".join(map(_typical, (errors, ends, resumes)))
    return f"| {kind.value} | {len(faults)} | {starting} | {times} |"


def _typical(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"
