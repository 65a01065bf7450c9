"""What the rows say: gaps to AdamW with their spread, and the verdicts by the thresholds that were
set beforehand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from studies.numerics.rows import GROUPS, SEEDS, SHORTER_STARTS, Group, Row, end_loss, stored
from studies.numerics.rules import reference_of, with_references
from studies.numerics.student import quantile, upper_tail
from studies.numerics.tasks import TASKS

LIMITS = {
    "ours-1": 1.0,
    "ours-2": 1.5,
    "ours-4": 1.5,
    "ours-8": 3.0,
    "adamw-bf16": 0.5,
    **dict.fromkeys(
        ("ours-1-bf16", "ours-1-bf16-from-40", "adamw-int8", "ours-1-int8-from-40"), 1.0
    ),
    **dict.fromkeys(("lion-bf16", "lion-delay", "lion-signs", "lion-means"), 1.0),
    **dict.fromkeys(("ours-1-dithered", *SHORTER_STARTS), 1.0),
    "ours-2-dithered": 1.5,
    "ours-4-dithered": 1.5,
}
"""Largest gap in percent that upholds the claim."""
GROWTH_LIMIT = 0.5
"""Largest growth of a gap in percentage points that upholds "does not grow"."""
SIGNIFICANT = 0.05

Verdict = Literal["upheld", "refuted", "open", ""]


@dataclass(frozen=True)
class Sample:
    """Paired differences, one per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Of the two-sided 90 % interval of the mean; None with one value."""
        n = len(self.values)
        return None if n < 2 else quantile(0.95, n - 1) * statistics.stdev(self.values) / n**0.5

    @property
    def p_above_zero(self) -> float | None:
        """Of the one-sided paired t-test that the mean is above zero; None with one value."""
        n = len(self.values)
        if n < 2:
            return None
        spread = statistics.stdev(self.values)
        if not spread:
            return 0.0 if self.mean > 0 else 1.0
        return upper_tail(self.mean / (spread / n**0.5), n - 1)

    def verdict(self, limit: float) -> Verdict:
        """Refuted: above the limit, and above zero by more than chance. Upheld: the interval is
        below the limit."""
        width, p = self.half_width, self.p_above_zero
        if width is None or p is None:
            return "open"
        if self.mean > limit and p < SIGNIFICANT:
            return "refuted"
        return "upheld" if self.mean + width < limit else "open"


@dataclass(frozen=True)
class Line:
    """One line of the table: a rule under a task and a setting.

    Attributes:
        done, wanted: seeds.
        diverged: how many of `done` have no finite loss.
        loss, held_out: means over the seeds that did not diverge.
        gap, held_out_gap: in percent, paired with AdamW by seed; None for AdamW, or without a pair.
    """

    group: str
    task: str
    setting: str
    rule: str
    done: int
    wanted: int
    diverged: int = 0
    loss: float | None = None
    held_out: float | None = None
    gap: Sample | None = None
    held_out_gap: Sample | None = None

    @property
    def verdict(self) -> Verdict:
        """By the limit of the rule or the task; a diverged row refutes, and without all seeds a
        line is open."""
        limit = LIMITS.get(self.rule)
        if limit is None or not self.done:
            return ""
        if self.diverged:
            return "refuted"
        if self.gap is None or self.done < self.wanted:
            return "open"
        return self.gap.verdict(TASKS[self.task].limit or limit)


def _pair(row: Row) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A row and AdamW's of the same task, setting and seed, if both are there with the same
    learning rate."""
    mine, best = stored(row), stored(Row(row.task, reference_of(row.rule), row.setting, row.seed))
    if mine is None or best is None or mine["diverged"] or best["diverged"]:
        return None
    if mine["rate"] != best["rate"]:
        raise ValueError(
            f"{row.name} has learning rate {mine['rate']}, "
            f"its AdamW {best['rate']}: run one of them again"
        )
    return mine, best


def gap_of(row: Row) -> float | None:
    """The gap of one seed in percent of AdamW's loss, or of its improvement over the start."""
    pair = _pair(row)
    if pair is None:
        return None
    loss, best = end_loss(pair[0]), end_loss(pair[1])
    assert loss is not None
    assert best is not None
    whole = best if TASKS[row.task].margin == "loss" else pair[1]["held_out_before"] - best
    return 100.0 * (loss - best) / whole


def held_out_gap_of(row: Row) -> float | None:
    """`gap_of`, with the held-out loss."""
    pair = _pair(row)
    if pair is None:
        return None
    loss, best = pair[0]["held_out"], pair[1]["held_out"]
    whole = best if TASKS[row.task].margin == "loss" else pair[1]["held_out_before"] - best
    return 100.0 * (loss - best) / whole


def _sample(values: Sequence[float | None]) -> Sample | None:
    known = tuple(value for value in values if value is not None)
    return Sample(known) if known else None


def line_of(group: Group, task: str, setting: str, rule: str) -> Line:
    """The line of all seeds of a rule."""
    rows = [Row(task, rule, setting, seed) for seed in group.seeds]
    results = [result for result in map(stored, rows) if result is not None]
    good = [result for result in results if not result["diverged"]]
    line = Line(group.name, task, setting, rule, len(results), len(rows), len(results) - len(good))
    if not good:
        return line
    losses = [loss for loss in map(end_loss, good) if loss is not None]
    means = {
        "loss": statistics.fmean(losses),
        "held_out": statistics.fmean(r["held_out"] for r in good),
    }
    gaps = {}
    if rule != reference_of(rule):
        gaps = {
            "gap": _sample([*map(gap_of, rows)]),
            "held_out_gap": _sample([*map(held_out_gap_of, rows)]),
        }
    return Line(
        line.group, task, setting, rule, line.done, line.wanted, line.diverged, **means, **gaps
    )


def lines() -> list[Line]:
    """All lines of the plan, in its order, each once."""
    found: dict[tuple[str, str, str, tuple[int, ...]], Line] = {}
    for group in GROUPS:
        for task, setting, rules in group.cases:
            for rule in with_references(rules):
                if (task, setting, rule, group.seeds) not in found:
                    found[task, setting, rule, group.seeds] = line_of(group, task, setting, rule)
    return list(found.values())


# -- does the gap grow? ----------------------------------------------------------------------------

TRENDS: tuple[tuple[str, tuple[str, str], tuple[str, str]], ...] = (
    ("size, 1 to 5 million", ("bytes-1m", "base"), ("bytes-5m", "base")),
    ("size, 1 to 20 million", ("bytes-1m", "base"), ("bytes-20m", "base")),
    ("steps, 400 to 2,000", ("bytes-1m", "base"), ("bytes-1m", "steps-2000")),
    ("ranks, 1 to 2", ("bytes-1m", "base"), ("bytes-1m", "ranks-2")),
    ("ranks, 1 to 4", ("bytes-1m", "base"), ("bytes-1m", "ranks-4")),
    ("batch, 8 to 2", ("bytes-1m", "base"), ("bytes-1m", "batch-quarter")),
    ("batch, 8 to 32", ("bytes-1m", "base"), ("bytes-1m", "batch-4x")),
)
"""What grows, from which task and setting to which."""


@dataclass(frozen=True)
class Trend:
    """By how many percentage points the gap of a rule grows."""

    what: str
    rule: str
    growth: Sample | None

    @property
    def verdict(self) -> Verdict:
        """By `GROWTH_LIMIT`."""
        if self.growth is None:
            return ""
        return (
            self.growth.verdict(GROWTH_LIMIT) if len(self.growth.values) == len(SEEDS) else "open"
        )


def trends() -> list[Trend]:
    """All of them, for both intervals."""
    found = []
    for what, smaller, larger in TRENDS:
        for rule in ("ours-1", "ours-4"):
            differences: list[float | None] = []
            for seed in SEEDS:
                gaps = [
                    gap_of(Row(task, rule, setting, seed)) for task, setting in (smaller, larger)
                ]
                differences.append(
                    None if gaps[0] is None or gaps[1] is None else gaps[1] - gaps[0]
                )
            found.append(Trend(what, rule, _sample(differences)))
    return found


# -- which rule is better? -------------------------------------------------------------------------

OURS = "ours-1"
DENOMINATOR_LIMIT = 0.5
"""Percentage points by which blocks of 32 may be worse than v itself."""
RELATIVES: tuple[tuple[str, str], ...] = (
    ("delay", "base"),
    ("feedback", "base"),
    ("momentum", "base"),
    ("sapipe", "ranks-2"),
    ("acco", "ranks-2"),
    ("upstream-sequential", "constant"),
    ("upstream-overlapped", "constant"),
)
"""Rules with the setting under which ours is beside them, on `bytes-1m`."""
DELAYS = ("delay", "delay-beta1-0.95", "delay-beta1-0.975")
"""From the largest expected gap to the smallest."""


@dataclass(frozen=True)
class Contrast:
    """By how many percentage points the gap of `worse` is above that of `better`.

    Attributes:
        limit: the contrast is refuted above it (H4); None: it is refuted at or below zero (H3).
    """

    hypothesis: str
    setting: str
    worse: str
    better: str
    difference: Sample | None
    limit: float | None = None

    @property
    def verdict(self) -> Verdict:
        """As the plan says."""
        if self.difference is None:
            return ""
        if len(self.difference.values) < len(SEEDS):
            return "open"
        if self.limit is not None:
            return "refuted" if self.difference.mean > self.limit else "upheld"
        return "upheld" if self.difference.mean > 0 else "refuted"


def _contrast(
    hypothesis: str, setting: str, worse: str, better: str, limit: float | None = None
) -> Contrast:
    differences: list[float | None] = []
    for seed in SEEDS:
        gaps = [gap_of(Row("bytes-1m", rule, setting, seed)) for rule in (worse, better)]
        differences.append(None if gaps[0] is None or gaps[1] is None else gaps[0] - gaps[1])
    return Contrast(hypothesis, setting, worse, better, _sample(differences), limit)


def contrasts() -> list[Contrast]:
    """H3, H4, and H5 of the amendments."""
    found = [_contrast("H3", setting, rule, OURS) for rule, setting in RELATIVES]
    found += [_contrast("H5", "base", larger, smaller) for larger, smaller in pairwise(DELAYS)]
    found.append(_contrast("H4", "base", OURS, f"{OURS}-exact-v", DENOMINATOR_LIMIT))
    return [*found, _contrast("H4", "base", f"{OURS}-one-mean", OURS)]
