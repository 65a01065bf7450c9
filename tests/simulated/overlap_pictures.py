"""Draw what `tests.simulated.overlap --traces FOLDER` has written. Needs matplotlib (the extra
`plots`).

python -m tests.simulated.overlap_pictures FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

WAYS = {"inside of the step": "inside-of-the-step", "beside the next step": "beside-the-next-step"}
LANES = {"compute": "#4477aa", "copy down": "#ee6677", "worker": "#ccbb44", "copy up": "#228833"}
SHOWN_STEPS, ALL_STEPS = 3, 8


def main() -> None:
    traces, output = Path(sys.argv[1]), Path(sys.argv[2])
    mpl.rcParams["svg.hashsalt"] = "overlap"  # the same picture has the same bytes
    draw_timelines(traces, output / "hidden_transfers_timelines.svg")
    draw_slower_links(traces, output / "hidden_transfers_links.svg")


def draw_timelines(traces: Path, path: Path) -> None:
    """Both ways, some steps, a lane in each row."""
    figure, axes = plt.subplots(len(WAYS), 1, figsize=(10, 4.2), sharex=True)
    for axis, (title, name) in zip(axes, WAYS.items(), strict=True):
        spans = lanes_of(traces / f"stage-2_1-ranks_accumulation-1_{name}.json")
        end = (
            max(begin + us for found in spans.values() for begin, us in found)
            * SHOWN_STEPS
            / ALL_STEPS
        )
        for row, (lane, color) in enumerate(LANES.items()):
            shown = [(begin, us) for begin, us in spans.get(lane, []) if begin < end]
            axis.broken_barh(shown, (-row - 0.4, 0.8), color=color, linewidth=0)
        axis.set_yticks([-row for row in range(len(LANES))], list(LANES))
        axis.set_title(f"copies {title} ({SHOWN_STEPS} steps)", fontsize=10, loc="left")
    axes[-1].set_xlabel("microseconds (a simulation)")
    save(figure, path)


def lanes_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Lane -> begin and duration of its spans; the optimizer process's passes are "worker"."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        spans.setdefault(event["cat"], []).append((event["ts"], event["dur"]))
    return spans


def draw_slower_links(traces: Path, path: Path) -> None:
    """Length of a step over the time of the copies."""
    rows: list[dict[str, float]] = json.loads((traces / "slower_links.json").read_text())
    figure, axis = plt.subplots(figsize=(6, 3.6))
    styles: dict[str, dict[str, Any]] = {
        "inside": {"marker": "o", "label": "copies inside of the step"},
        "beside": {"marker": "o", "label": "copies beside the next step"},
        "expected": {"linestyle": "--", "color": "black", "label": "expected beside"},
    }
    for name, style in styles.items():
        axis.plot([row["link"] for row in rows], [row[name] for row in rows], **style)
    axis.set(
        xlabel="copies each way, in steps", ylabel="step, in steps without copies", ylim=(0, None)
    )
    axis.legend(fontsize=8)
    axis.set_title("a simulation", fontsize=9, loc="left")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
