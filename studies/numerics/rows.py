"""The rows of the study: what they are, in which order they are run, and the files that hold
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.numerics.rules import REFERENCE, SPLITTING, reference_of, with_references
from studies.numerics.tasks import BORROWED_RATES, TASKS
from tests.perf import report
from tools import stored as measurements

FOLDER = Path("benchmarks") / "numerics"
SELECTION_SEED = 100
"""Of the rows that choose learning rates; no row of a comparison has it."""
LION_PART = 5
"""Candidates for Lion's learning rate are those of AdamW over this."""
WINDOW = 50
"""Steps at the end whose mean loss is the primary measure."""


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        rate: peak learning rate, if it is not the chosen one of the task.
    """

    task: str
    rule: str
    setting: str
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        parts = [self.task, self.rule, self.setting, f"seed{self.seed}"]
        return "__".join(parts if self.rate is None else [*parts, f"lr{self.rate:g}"])


def folder() -> Path:
    """Where the files are."""
    return report.ROOT / FOLDER


def stored(row: Row) -> dict[str, Any] | None:
    """What the file of a row holds, if there is one."""
    with suppress(FileNotFoundError):
        return dict(measurements.read(f"{FOLDER.name}/{row.name}.json", folder().parent))
    return None


def store(row: Row, result: dict[str, Any]) -> Path:
    """Write the file of a row."""
    path = folder() / f"{row.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"row": vars(row), **result}) + "\n")
    partial.replace(path)
    return path


def end_loss(result: dict[str, Any]) -> float | None:
    """The primary measure: the mean loss of the last `WINDOW` steps; None if the row diverged."""
    if result["diverged"]:
        return None
    last = result["losses"][-WINDOW:]
    return sum(last) / len(last)


class NoRateError(LookupError):
    """The learning rate of a task has not been chosen yet."""


def selection_rows(task: str, rule: str = REFERENCE) -> list[Row]:
    """The rows of which the learning rate of a task is chosen, on a seed of their own: by Lion for
    rules of Lion, by AdamW with beta1 of 0.9 for all others."""
    task = BORROWED_RATES.get(task, task)
    chooser, part = ("lion", 1 / LION_PART) if reference_of(rule) == "lion" else (REFERENCE, 1.0)
    return [
        Row(task, chooser, TASKS[task].selection, SELECTION_SEED, rate * part)
        for rate in TASKS[task].rates
    ]


def rate_of(row: Row) -> float:
    """The peak learning rate of a row: its own, or the one with the lowest loss in all of
    `selection_rows`."""
    if row.rate is not None:
        return row.rate
    losses: dict[float, float] = {}
    for candidate in selection_rows(row.task, row.rule):
        result = stored(candidate)
        if result is None:
            raise NoRateError(
                f"no learning rate for {row.task}: {candidate.name} has not been run; "
                f"run `python -m studies.numerics --rows rates --tasks {candidate.task}` first"
            )
        assert candidate.rate is not None
        losses[candidate.rate] = end_loss(result) or float("inf")
    return min(losses, key=lambda rate: losses[rate])


# -- the order -------------------------------------------------------------------------------------

SEEDS = (0, 1, 2)
LATER_SEEDS = (10, 11, 12)
"""Of rows that were added when Python's own sources, of which the texts are made, had changed: rows
of one seed have the same texts."""
DELAYED = ("ours-1", "ours-4", "delay")
"""What every comparison holds, beside AdamW."""
SHORTER_STARTS = ("ours-1-dithered-from-2", "ours-1-dithered-from-10", "ours-1-dithered-from-20")
"""Interval 1 with fewer than the 40 synchronous steps of the default."""


@dataclass(frozen=True)
class Group:
    """Rows that answer one part of the question.

    Attributes:
        cases: (task, setting, rules beside AdamW).
    """

    name: str
    title: str
    cases: tuple[tuple[str, str, tuple[str, ...]], ...]
    seeds: tuple[int, ...] = SEEDS

    def rows(self) -> Iterator[Row]:
        """All rows, one seed after the other."""
        for seed in self.seeds:
            for task, setting, rules in self.cases:
                for rule in with_references(rules):
                    yield Row(task, rule, setting, seed)


def _each(
    tasks: tuple[str, ...], settings: tuple[str, ...], rules: tuple[str, ...]
) -> tuple[Any, ...]:
    return tuple((task, setting, rules) for task in tasks for setting in settings)


GROUPS: tuple[Group, ...] = (
    Group(
        "main", "One million parameters, all that matters most", (("bytes-1m", "base", DELAYED),)
    ),
    Group(
        "stress",
        "Where the block mean of v could mislead",
        (
            *_each(("digits", "embeddings", "experts"), ("base",), DELAYED),
            ("reactions", "steps-100", DELAYED),
            ("spikes", "base", DELAYED),
        ),
    ),
    Group(
        "relatives",
        "Ours beside its relatives",
        (
            ("bytes-1m", "base", ("adamw-disturbed", "feedback", "momentum")),
            ("bytes-1m", "ranks-2", ("acco", "sapipe")),
        ),
    ),
    Group(
        "seeds",
        "Ten seeds, an amendment",
        (("bytes-1m", "base", ("ours-1",)),),
        seeds=tuple(range(10)),
    ),
    Group(
        "settings",
        "Other settings",
        _each(("bytes-1m",), ("constant", "beta2-0.999", "fp32"), DELAYED),
    ),
    Group(
        "denominator",
        "What the mean of v costs, and longer intervals",
        (("bytes-1m", "base", ("ours-1-one-mean", "ours-1-exact-v", "ours-2", "ours-8")),),
    ),
    Group("five", "Five million parameters", (("bytes-5m", "base", DELAYED),)),
    Group(
        "five-chance",
        "Chance at five million, an amendment",
        (("bytes-5m", "base", ("adamw-disturbed",)),),
    ),
    Group(
        "five-seeds",
        "Six seeds of five million, an amendment",
        (("bytes-5m", "base", ("ours-1",)),),
        seeds=tuple(range(6)),
    ),
    Group(
        "ranks",
        "Simulated ranks",
        _each(("bytes-1m",), ("ranks-2", "ranks-4"), ("ours-1", "ours-4")),
    ),
    Group(
        "batch",
        "Batch size",
        _each(("bytes-1m",), ("batch-quarter", "batch-4x"), ("ours-1", "ours-4")),
    ),
    Group(
        "precision",
        "Precision and clipping",
        _each(("bytes-1m",), ("fp16", "no-clip"), ("ours-1", "ours-4")),
    ),
    Group("long", "2,000 steps", (("bytes-1m", "steps-2000", DELAYED),)),
    Group("twenty", "Twenty million parameters", (("bytes-20m", "base", DELAYED),), seeds=(0,)),
    Group("spikes", "Spikes without clipping", (("spikes", "no-clip", DELAYED),)),
    Group(
        "upstream",
        "Upstream's ZenFlow",
        (("bytes-1m", "constant", ("upstream-sequential", "upstream-overlapped")),),
        seeds=(0,),
    ),
    Group(
        "more",
        "The mean of v at interval 4",
        (("bytes-1m", "base", ("ours-4-one-mean", "ours-4-exact-v")),),
    ),
    Group(
        "remedies",
        "A later start of overlap, and smaller blocks, an amendment",
        (
            ("bytes-5m", "base", ("ours-1-from-40", "ours-4-blocks-8")),
            ("bytes-1m", "base", ("ours-4-blocks-8",)),
        ),
    ),
    Group(
        "start",
        "The new default's start at interval 4, an amendment",
        (("bytes-5m", "base", ("ours-4-from-40",)), ("bytes-1m", "batch-4x", ("ours-4-from-40",))),
    ),
    Group(
        "two",
        "The longest measured interval, an amendment",
        (("bytes-1m", "batch-4x", ("ours-2-from-40",)), ("bytes-5m", "base", ("ours-2-from-40",))),
    ),
    Group(
        "lion",
        "Lion, an amendment",
        (("bytes-1m", "base", ("lion-bf16", "lion-delay", "lion-signs", "lion-means")),),
    ),
    Group(
        "rounded",
        "Moments in bf16, an amendment",
        (
            ("bytes-1m", "base", ("adamw-bf16", "ours-1", "ours-1-bf16", "adamw-disturbed")),
            ("bytes-1m", "beta2-0.999", ("adamw-bf16", "ours-1", "ours-1-bf16", "ours-1-from-40")),
            *_each(("embeddings", "experts", "spikes"), ("base",), ("adamw-bf16",)),
            ("reactions", "steps-100", ("adamw-bf16",)),
            ("bytes-5m", "base", ("adamw-bf16", "ours-1-bf16-from-40")),
        ),
        seeds=LATER_SEEDS,
    ),
    Group(
        "rounded-long",
        "Moments in bf16 for 2,000 steps, an amendment",
        (("bytes-1m", "steps-2000", ("adamw-bf16",)),),
        seeds=LATER_SEEDS,
    ),
    Group(
        "rounded-twenty",
        "Moments in bf16 at twenty million, an amendment",
        (("bytes-20m", "base", ("adamw-bf16",)),),
        seeds=LATER_SEEDS[:1],
    ),
    Group(
        "eight",
        "Moments of 8 bits, an amendment",
        (
            ("bytes-1m", "base", ("adamw-int8", "ours-1-int8-from-40")),
            ("bytes-1m", "beta2-0.999", ("adamw-int8",)),
            *_each(("embeddings", "experts", "spikes"), ("base",), ("adamw-int8",)),
            ("bytes-5m", "base", ("adamw-int8",)),
        ),
        seeds=LATER_SEEDS,
    ),
    Group(
        "eight-long",
        "Moments of 8 bits for 2,000 steps, an amendment",
        (("bytes-1m", "steps-2000", ("adamw-int8",)),),
        seeds=LATER_SEEDS,
    ),
    Group(
        "eight-twenty",
        "Moments of 8 bits at twenty million, an amendment",
        (("bytes-20m", "base", ("adamw-int8",)),),
        seeds=LATER_SEEDS[:1],
    ),
    Group(
        "dithered",
        "Dithered estimates, an amendment",
        (
            ("bytes-1m", "base", ("ours-1-dithered", "ours-2-dithered", "ours-4-dithered")),
            ("bytes-1m", "batch-4x", ("ours-1-dithered", "ours-4-dithered")),
            ("bytes-5m", "base", ("ours-1-dithered", "ours-4-dithered")),
        ),
        seeds=LATER_SEEDS,
    ),
    Group(
        "fine-tune",
        "A fine-tune with compressed moments and with dithered estimates, an amendment",
        (("reactions", "steps-100", ("adamw-bf16", "adamw-int8", "ours-1-dithered")),),
        seeds=LATER_SEEDS,
    ),
    Group(
        "ahead",
        "NAdam beside AdamW and ours, an amendment",
        (("bytes-1m", "base", ("nadam",)),),
        seeds=LATER_SEEDS,
    ),
    Group(
        "ahead-long",
        "NAdam and ours for 2,000 steps, an amendment",
        (("bytes-1m", "steps-2000", ("nadam", "ours-1-dithered")),),
        seeds=LATER_SEEDS,
    ),
    Group(
        "start-dithered",
        "A shorter synchronous start with dithered estimates, an amendment",
        (
            ("reactions", "steps-100", SHORTER_STARTS),
            ("bytes-1m", "base", SHORTER_STARTS),
            ("bytes-5m", "base", ("ours-1-dithered-from-2", "ours-1-dithered-from-10")),
        ),
        seeds=LATER_SEEDS,
    ),
    Group(
        "start-beta2",
        "The same with beta2 of 0.999, an amendment",
        (
            (
                "bytes-1m",
                "beta2-0.999",
                ("ours-1-dithered", "ours-1-dithered-from-2", "ours-1-dithered-from-10"),
            ),
        ),
        seeds=LATER_SEEDS,
    ),
    Group(
        "beta1",
        "A delay at larger beta1, an amendment",
        (("bytes-1m", "base", ("delay-beta1-0.95", "delay-beta1-0.975")),),
    ),
)


def planned() -> list[tuple[str, Row]]:
    """Every row with its group, in order of importance; the selection of a learning rate before its
    first use."""
    found: dict[Row, str] = {}
    for group in GROUPS:
        for row in group.rows():
            for needed in (*selection_rows(row.task, row.rule), row):
                found.setdefault(needed, "rates" if needed.seed == SELECTION_SEED else group.name)
    return [(group, row) for row, group in found.items()]


def check_registry() -> None:
    """Every planned row can be run: a rule that splits the batch has ranks."""
    from studies.numerics.settings import SETTINGS

    for _, row in planned():
        if row.rule in SPLITTING and SETTINGS[row.setting].ranks < 2:
            raise ValueError(f"{row.name}: {row.rule} needs a setting with at least two ranks")
