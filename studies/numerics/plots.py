"""Draws losses by step and by second, as SVG beside docs/results/numerics.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from studies.numerics.rows import GROUPS, WINDOW, Row, stored
from studies.numerics.rules import REFERENCE
from studies.numerics.table import page
from studies.numerics.training import SECONDS_EVERY

NAMED = (REFERENCE, "ours-1", "ours-2", "ours-4", "delay")
"""Rules with a colour of their own where a figure has more than `MOST_COLORS`; the others are grey
behind them."""
MOST_COLORS = 7
THINNED = 5
"""Every how many steps a figure has a point; the losses are smoothed over more."""


def _smooth(losses: list[float]) -> list[float]:
    width = min(WINDOW, len(losses))
    return [statistics.fmean(losses[end - width : end]) for end in range(width, len(losses) + 1)]


def _results(task: str, setting: str, rules: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = {rule: stored(Row(task, rule, setting, 0)) for rule in (REFERENCE, *rules)}
    return {
        rule: result
        for rule, result in found.items()
        if result is not None and len(result["losses"]) > WINDOW
    }


def draw() -> list[Path]:
    """One figure for each task and setting of which seed 0 has AdamW and another rule; returns
    their paths."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "numerics"  # the same file for the same rows
    from matplotlib import pyplot as plt

    rules: dict[tuple[str, str], tuple[str, ...]] = {}
    for group in GROUPS:
        for task, setting, found in group.cases:
            rules[task, setting] = (*rules.get((task, setting), ()), *found)
    paths = []
    for (task, setting), names in rules.items():
        results = _results(task, setting, names)
        if REFERENCE not in results or len(results) < 2:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
        quiet = (
            [rule for rule in results if rule not in NAMED] if len(results) > MOST_COLORS else []
        )
        for rule, result in results.items():
            style = {"color": "0.8", "zorder": 1} if rule in quiet else {"label": rule}
            losses = result["losses"]
            smooth = _smooth(losses)
            first = len(losses) - len(smooth) + 1
            steps = range(first, len(losses) + 1)[::THINNED]
            (line,) = axes[0].plot(steps, smooth[::THINNED], linewidth=1, **style)
            ends = range(SECONDS_EVERY, len(losses) + 1, SECONDS_EVERY)
            if result.get("clock") == "CPU":
                points = [
                    (second, smooth[end - first])
                    for second, end in zip(result["seconds"], ends, strict=True)
                ]
                axes[1].plot(
                    *zip(*points, strict=True),
                    linewidth=1,
                    color=line.get_color(),
                    zorder=line.get_zorder(),
                )
        if quiet:
            axes[0].plot([], [], color="0.8", label=f"{len(quiet)} other rules, in the tables")
        axes[0].set(
            xlabel="step",
            ylabel=f"loss, mean of {WINDOW} steps",
            title=f"{task}, {setting}, seed 0",
        )
        axes[1].set(
            xlabel="second of one CPU", title="every rule on one thread, one after the other"
        )
        axes[0].legend(fontsize=8)
        path = page().parent / f"numerics_{task}_{setting}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        paths.append(path)
    return paths
