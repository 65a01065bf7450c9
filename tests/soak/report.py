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
    """Write ``soak.json`` to `folder`; returns a summary."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"provenance": provenance(), "settings": asdict(settings), "seconds": seconds}
    values["rounds"] = [asdict(record) for record in records]
    (folder / "soak.json").write_text(json.dumps(values, indent=1) + "\n")
    return summary(records, seconds)


def summary(records: list[RoundRecord], seconds: float) -> str:
    """What happened: a line, and one for each kind of fault and each round that failed."""
    faults = [fault for record in records for fault in record.faults]
    failed = [record for record in records if record.failure]
    verdict = f"FAILED in {len(failed)} of {len(records)} rounds" if failed else "passed"
    lines = [
        f"{verdict}: {seconds / 60:.0f} minutes, {len(records)} rounds, {len(faults)} faults, "
        f"{sum(record.steps for record in records):,} steps, "
        f"{sum(record.losses_compared for record in records):,} losses compared with an "
        "undisturbed run, to the bit. Seconds: median (longest)."
    ]
    for kind in Kind:
        of_kind = [fault for fault in faults if fault.kind == kind.value]
        times = (
            _typical([getattr(fault, f"seconds_to_{name}") for fault in of_kind])
            for name in ("error", "end", "resume")
        )
        lines.append(f"{kind.value}: {len(of_kind)}; to error, end, next step: {', '.join(times)}")
    return "\n".join([*lines, *(f"round {each.number}: {each.failure}" for each in failed)])


def _typical(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):.1f} ({max(found):.1f})" if found else "-"
