"""Writes the tables of docs/lab/archive/time_model.md, and draws its residuals."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from studies.time_model.inputs import Inputs, Row
from studies.time_model.schedules import base_of, implied_host, ours, predicted

__all__ = ["PAGE", "PICTURE", "draw", "ratio", "written"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lab" / "archive" / "time_model.md"
PICTURE = PAGE.with_name("time_model_residuals.svg")
CLOSE = 1.25
"""A prediction is close if it is off by no more than this factor."""
OVERLAPPED = ("prime-rl", "torchao", "SuperOffload")
UNITS = {"TFLOPS": " TFLOPS", "times ZeRO-Offload": " times"}


def ratio(row: Row, inputs: Inputs) -> float:
    """Predicted over published: below 1, the step was slower than the model says. TFLOPS are turned
    round."""
    found = predicted(row, inputs) / row.published
    return (
        found
        if row.quantity in ("step", "pass", "exposed")
        else 1 / found
        if row.quantity == "TFLOPS"
        else found
    )


def written(text: str, inputs: Inputs) -> str:
    """`text` with every table between its marks.

    Raises:
        ValueError: a table has no place in the text.
    """
    tables: dict[str, Callable[[Inputs], str]] = {
        "verdict": _verdict,
        "residuals": _residuals,
        "unused": _unused,
        "machines": _machines,
        "systems": _systems,
        "ours": _ours,
    }
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name}: expected {begin.strip()} and {end} once each")
        before, rest = text.split(begin)
        text = before + begin + table(inputs) + end + rest.split(end)[1]
    return text


def _verdict(inputs: Inputs) -> str:
    def words(rows: list[Row]) -> str:
        ratios = [ratio(row, inputs) for row in rows]
        close = sum(1 / CLOSE <= each <= CLOSE for each in ratios)
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        spread = f"mean ratio {mean:.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        return f"{close} of {len(rows)} within {100 * (CLOSE - 1):.0f} % ({spread})"

    behind = [row for row in inputs.rows if row.system in OVERLAPPED]
    others = [row for row in inputs.rows if row.system not in OVERLAPPED]
    hidden = sum(row.base is not None and predicted(row, inputs) == row.base for row in behind)
    return (
        f"**Predicted over published: schedules beside backward {words(behind)}; "
        f"all others {words(others)}. For {hidden} of the {len(behind)} "
        "the model only says that everything is hidden.**\n"
    )


def _residuals(inputs: Inputs) -> str:
    head = [
        "system",
        "model",
        "published",
        "predicted",
        "ratio",
        "exposed: published, predicted",
        "host, implied",
        "",
    ]
    lines = [f"| {' | '.join(head)} |\n", "|" + " --- |" * len(head) + "\n"]
    for row in inputs.rows:
        unit = UNITS.get(row.quantity, " s")
        host = implied_host(row, inputs)
        stated = inputs.machines[row.machine].host / 1e9
        implied = "" if host is None else f"{host / 1e9:,.0f} of {stated:,.0f} GB/s"
        cells = [
            f"[{row.system}]({row.source})",
            row.name,
            f"{row.published:g}{unit}",
            f"{predicted(row, inputs):.2f}{unit}",
            f"{ratio(row, inputs):.2f}",
            _exposed(row, inputs),
            implied,
            row.note,
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _exposed(row: Row, inputs: Inputs) -> str:
    """What a step takes longer than without offload."""
    if row.base is None or row.quantity != "step":
        return ""
    return f"{row.published - row.base:.2f} s, {predicted(row, inputs) - row.base:.2f} s"


def _unused(inputs: Inputs) -> str:
    return "".join(f"- [{each.name}]({each.source}). {each.why}\n" for each in inputs.unused)


def _machines(inputs: Inputs) -> str:
    lines = [
        "| machine | link, GB/s | host, GB/s | GPU, TFLOP/s | from |\n",
        "|" + " --- |" * 5 + "\n",
    ]
    for name, machine in inputs.machines.items():
        speeds = f"{machine.link / 1e9:g} | {machine.host / 1e9:.0f} | {machine.flops / 1e12:g}"
        lines.append(f"| {name} | {speeds} | {_linked(inputs.hardware[name]['why'])} |\n")
    return "".join(lines)


def _linked(text: str) -> str:
    """With its URLs as links."""
    return re.sub(r"https?://[^\s)]+[^\s).]", lambda url: f"<{url[0]}>", text)


def _systems(inputs: Inputs) -> str:
    lines = [
        "| system | schedule | down | up | in host memory | why |\n",
        "|" + " --- |" * 6 + "\n",
    ]
    for name, system in inputs.systems.items():
        moved = f"{system.down:g} | {system.up:g} | {system.passed:g}" if system.passed else " | | "
        lines.append(f"| {name} | {system.schedule} | {moved} | {system.why} |\n")
    return "".join(lines)


def _ours(inputs: Inputs) -> str:
    head = [
        "model, their system",
        "machine",
        "without offload",
        "theirs, published",
        "theirs, predicted",
    ]
    head += ["ours, **predicted**", "ours, **predicted**, host as implied"]
    lines = [f"| {' | '.join(head)} |\n", "|" + " --- |" * len(head) + "\n"]
    for row in inputs.rows:
        if row.quantity != "step" or row.share < 1:
            continue
        machine, host = inputs.machines[row.machine], implied_host(row, inputs)
        slower = "" if host is None else f"{ours(row, replace(machine, host=host)):.2f}"
        seconds = [base_of(row, machine), row.published, predicted(row, inputs), ours(row, machine)]
        cells = [
            f"{row.name}, {row.system}",
            row.machine,
            *(f"{each:.2f}" for each in seconds),
            slower,
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def draw(inputs: Inputs, path: Path = PICTURE) -> None:
    """Draw the ratio of every row."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "time model"  # the same picture has the same bytes
    figure = Figure(figsize=(9, 0.28 * len(inputs.rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.system for row in inputs.rows))
    places = range(len(inputs.rows), 0, -1)
    for number, name in enumerate(names):
        points = [
            (ratio(row, inputs), y)
            for row, y in zip(inputs.rows, places, strict=True)
            if row.system == name
        ]
        axes.plot(
            *zip(*points, strict=True), "osv^Dx*P"[number % 8], color=f"C{number}", label=name
        )
    axes.axvspan(1 / CLOSE, CLOSE, color="0.92", zorder=0)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set(xscale="log", xlabel="predicted / published (left: slower than the model says)")
    ticks = (0.1, 0.2, 0.5, 1, 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(list(places), [row.name for row in inputs.rows], fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, metadata={"Date": None})
