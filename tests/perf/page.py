"""Write docs/lab/archive/benchmarks.md and its figures from what `make bench` has measured: `make
bench-report`.

python -m tests.perf.page

The page is made from benchmarks/cpu.json alone; a test compares the two. Each figure holds the
digest of its numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf import report
from tests.perf.cpu_parts import KEPT, parts

PAGE = report.ROOT / "docs" / "lab" / "archive" / "benchmarks.md"
LEAST_DRAWN = 3
"""Comparisons with a spread; fewer have no figure."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """What the page says about one result.

    Attributes:
        title, text: heading and the question that it answers.
        lab: the page of the lab that goes further; "": none.
        details: makes the rows of a second table out of the result; None: there is none.
    """

    title: str
    text: str
    lab: str = ""
    details: Callable[[dict[str, Any]], Rows] | None = None


def _rows(result: dict[str, Any]) -> Rows:
    return result["rows"]


def _bandwidth(result: dict[str, Any]) -> Rows:
    names = ("elements", "size", "contender", "ms per step", "GB/s", "cores")
    return [{name: row[name] for name in names} for row in result["rows"]]


def _of_each_system(result: dict[str, Any]) -> Rows:
    """The rehearsal's rows, a line a system, with what changes between the fewest and the most
    ranks."""
    systems: dict[str, Rows] = {}
    for row in result["rows"]:
        systems.setdefault(row["what"], []).append(row)
    found = []
    for what, rows in systems.items():
        first, last = rows[0], rows[-1]
        row = {"what": what, "when": first["when"]}
        for name, quantity, factor in (("ms", "seconds", 1e3), ("bytes received", "received", 1.0)):
            for one in dict.fromkeys((first["ranks"], last["ranks"])):
                value = next(r for r in rows if r["ranks"] == one)[quantity] * factor
                row[f"{name}, {one:,} ranks"] = report.number(value)
        found.append(row)
    return found


SECTIONS: dict[str, Section] = {
    "startup": Section(
        "Start-up of ZeRO-1/2",
        "What does each flattening tier cost in time, "
        "and how much memory does it need at the peak?",
        "flattening.md",
    ),
    "startup_breakdown": Section(
        "Where the seconds of a start go",
        "From `import torch` to the end of the first step, each start in processes of its own. "
        "Upstream's ZenFlow starts its process at its first update, which comes later.",
        "flattening.md#where-the-seconds-go",
        _rows,
    ),
    "gather": Section(
        "ZeRO-3 gather",
        "What does a gather into each parameter cost in time and memory?",
        "gather.md",
    ),
    "gather_large": Section(
        "ZeRO-3 gather, large parameters",
        "The same for weights of 64 MiB, fewer turns.",
        "gather.md",
    ),
    "offload_step": Section(
        "Offloaded step",
        "Does the trainer wait for the optimizer, and how much memory does it take?",
        "zenflow_step.md",
    ),
    "overlap": Section(
        "Hidden transfers",
        "How much of the optimizer's transfers does a step hide?",
        "hidden_transfers.md",
    ),
    "cpu_adam": Section(
        "CPU Adam",
        "How fast is the worker's pass, and is it bound by memory? "
        "GB/s are bytes that have to be read and written.",
        "cpu_adam.md",
        _bandwidth,
    ),
    "save": Section(
        "Saving", "How long does training stand still for a checkpoint?", "async_save.md"
    ),
    "estimate": Section(
        "Elementwise arithmetic",
        "How long does it take where the CPU computes it?",
        "zenflow_estimate.md",
    ),
    "convergence_losses": Section(
        "Convergence", "Does a short training reach AdamW's loss?", "zenflow_convergence.md", _rows
    ),
    "memory_plan": Section(
        "Memory before a run",
        "How far is `deepspeed-ext plan --memory` from what runs hold?",
        "memory_plan.md",
    ),
    "scale": Section(
        "Many ranks",
        "What does one rank compute and receive among many? **A rehearsal**: "
        "one real rank, all others made up.",
        "scale.md",
        _of_each_system,
    ),
}


def markdown(kept: dict[str, Any]) -> str:
    """The page."""
    results = {name: found for name in SECTIONS if (found := kept["settings"]["results"].get(name))}
    blocks = [_head(kept, results), _folded("The parts, and how long each took", _states(kept))]
    blocks += [_section(SECTIONS[name], name, result) for name, result in results.items()]
    return "\n\n".join(blocks) + "\n"


def _head(kept: dict[str, Any], results: dict[str, Any]) -> str:
    made = kept["provenance"]
    found = [result["provenance"] for result in results.values() if "provenance" in result]
    dates, commits = (
        ", ".join(sorted({one[name] for one in found})) for name in ("date", "commit")
    )
    loads = [one["load_at_start"] for one in found]
    versions = ", ".join(
        f"{name} {number}" for name, number in made["versions"].items() if number != "none"
    )
    return f"""# Benchmarks

<!-- This page is written by `make bench-report` from benchmarks/cpu.json; do not edit it. -->

deepspeed_ext compared with DeepSpeed and other rivals, as far as a machine without an accelerator can measure it:

```bash
make bench                 # measures, into outputs/bench/cpu.json
make bench ARGS=--store    # measures into benchmarks/cpu.json, which is tracked
make bench-report          # makes this page and its figures from that file
```

- {made["cpu"]}, {made["cores"]} cores, accelerator: {made["accelerator"]}; {versions}; {dates}, commit {commits}.
- Load average when a part began: {min(loads):.1f} to {max(loads):.1f}, which includes the part before it.
- A ratio is ours over the other, of both sides in the same turn (A B A B): below 1 ours is less, which is better
  but for GB/s. The tables have the median over turns, of several rows the least and the largest median. All rows, with
  their smallest and largest turn in brackets, are folded below each table.
- *Threads* are those of one process of either side. Where nothing varies between turns, there is one number.
- Rows that say so are **simulations**, and no measurement of a device.
- Times do not carry over to other machines. **Nothing here is a GPU's**; [what will be measured there](gpu.md)."""


def _folded(title: str, *blocks: str) -> str:
    """Blocks that are shown on a click, on the site and where the Markdown is shown as it is."""
    inner = "\n\n".join(blocks)
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{inner}\n\n</details>'


def _summary(comparisons: Rows) -> str:
    """A row for each rival and quantity: the least and the largest of the median ratios."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    for one in comparisons:
        if one["ratio"] is not None:
            key = one["quantity"], one["rival"], bool(one["simulation"])
            found.setdefault(key, []).append(one["ratio"]["median"])
    rows = []
    for (quantity, rival, simulated), medians in found.items():
        ends = dict.fromkeys(map(report.number, (min(medians), max(medians))))
        row = {
            "ratio": " to ".join(ends),
            "what": quantity + (" (simulation)" if simulated else ""),
        }
        rows.append(row | {"compared with": rival})
    return report.table(rows, dict.fromkeys(rows[0], str)) if rows else ""


def _section(section: Section, name: str, result: dict[str, Any]) -> str:
    comparisons = result.get("comparisons", [])
    simulated = any(one["simulation"] for one in comparisons)
    blocks = [
        f"## {section.title}",
        section.text + (" **A simulation** where a row says so." if simulated else ""),
    ]
    if section.lab:
        blocks[-1] += f" More in the [lab]({section.lab})."
    blocks += list(filter(None, [_summary(comparisons)]))
    if is_drawn(comparisons):
        blocks.append(
            f"![{section.title}: ratios with their smallest and largest]({figure_of(name).name})"
        )
    return "\n\n".join(
        [*blocks, _folded("All numbers, and the command", *_details(section, result))]
    )


def _details(section: Section, result: dict[str, Any]) -> Iterator[str]:
    comparisons = result.get("comparisons", [])
    if "provenance" in result:
        made = result["provenance"]
        yield (
            f"{made['date']}, commit {made['commit']}, load average at the start "
            f"{made['load_at_start']:.1f}."
        )
        yield f"```bash\n{made['command']}\n```"
    if comparisons:
        yield report.comparison_table(comparisons)
    if section.details is not None:
        rows = section.details(result)
        yield report.table(rows, dict.fromkeys(rows[0], report.shown))


def _states(kept: dict[str, Any]) -> str:
    measured = {row["part"]: row for row in kept["rows"]}
    rows = []
    for part in parts():
        row = measured.get(part.name)
        state, seconds = (
            ("not measured yet", "") if row is None else (row["state"], f"{row['seconds']:.0f}")
        )
        rows.append({"part": part.name, "state": state, "seconds": seconds})
    total = sum(measured[part.name]["seconds"] for part in parts() if part.name in measured)
    table = report.table(rows, dict.fromkeys(rows[0], str))
    return f"{table}\n\nAll parts that were measured, together: {total / 60:.1f} minutes."


def is_drawn(comparisons: Sequence[dict[str, Any]]) -> bool:
    """Whether a result has a figure: some of its ratios differ between turns."""
    return (
        sum(one["ratio"] is not None and one["ratio"]["count"] > 1 for one in comparisons)
        >= LEAST_DRAWN
    )


def figure_of(name: str) -> Path:
    """Where the figure of a result is."""
    return PAGE.with_name(f"benchmarks_{name}.svg")


def digest(comparisons: Sequence[dict[str, Any]]) -> str:
    """What a figure of these comparisons holds, so that it can be told from an older one."""
    return hashlib.sha256(json.dumps(comparisons, sort_keys=True).encode()).hexdigest()[:16]


def panels(comparisons: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """What a figure shows: under each title, what is compared and by which label; no label comes
    twice under one."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for one in comparisons:
        if one["ratio"] is not None:
            title = one["quantity"] + (
                f"\nsimulated: {one['simulation']}" if one["simulation"] else ""
            )
            found.setdefault(title, []).append((f"{one['subject']} / {one['rival']}", one))
    return {title: list(_distinct(rows)) for title, rows in found.items()}


def _distinct(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    labels = Counter(label for label, _ in rows)
    for label, one in rows:
        yield (label if labels[label] == 1 else f"{label}, threads {one['threads']}"), one


def draw(name: str, comparisons: Sequence[dict[str, Any]]) -> None:
    """Draw the ratios with their spread, a panel for each quantity: side by side if they compare
    the same, so that each label stands once; simulations are hollow."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = panels(comparisons)
    counts = [len(rows) for rows in shown.values()]
    beside = len({tuple(label for label, _ in rows) for rows in shown.values()}) == 1
    shape = (1, len(shown)) if beside else (len(shown), 1)
    heights = counts[:1] if beside else counts
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9}):
        figure = Figure(
            figsize=(10, 1.0 + sum(0.24 * count + 0.6 for count in heights)), layout="constrained"
        )
        figure.suptitle(SECTIONS[name].title.replace("`", ""), fontweight="bold")
        ratios = [count + 0.5 for count in heights]
        grid = figure.subplots(
            *shape, sharex=not beside, sharey=beside, squeeze=False, height_ratios=ratios
        )
        for axes, (title, rows) in zip(grid.flat, shown.items(), strict=True):
            _draw_panel(axes, title, rows)
        hollow = "; hollow: a simulation" if any(one["simulation"] for one in comparisons) else ""
        figure.supxlabel(
            f"ours / other: median, and smallest to largest of the turns{hollow}", fontsize=9
        )
        metadata = {"Date": None, "Creator": None, "Description": digest(comparisons)}
        figure.savefig(figure_of(name), format="svg", metadata=metadata)


def _draw_panel(axes: Any, title: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    for at, (_, one) in enumerate(reversed(rows)):
        ratio, color = one["ratio"], "C1" if one["simulation"] else "C0"
        inside = "white" if one["simulation"] else color
        axes.plot((ratio["min"], ratio["max"]), (at, at), color=color, linewidth=1.5)
        axes.plot(ratio["median"], at, "o", color=color, markersize=5, markerfacecolor=inside)
    axes.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.axvline(1.0, color="black", linewidth=0.7)
    axes.grid(axis="x", alpha=0.3)


def main() -> None:
    kept = json.loads(KEPT.read_text())
    for name in SECTIONS:
        comparisons = kept["settings"]["results"].get(name, {}).get("comparisons", [])
        if is_drawn(comparisons):
            draw(name, comparisons)
    PAGE.write_text(markdown(kept))
    print(f"written to {PAGE.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main()
