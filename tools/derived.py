"""Figures of pages that follow from stored measurements: sentences and lines of tables as the rows
give them, which the pages must have word by word.

    python -m tools.derived     # each with its page, and whether the page has it
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from tools import stored
from tools.architecture import ROOT

__all__ = ["missing", "said"]

RIVALS, DEFAULT = "gpu_h200_rivals.json", "gpu_h200_default.json"
LAST = 50
"""Steps at the end of a run whose mean loss is compared."""
SEEDS = (10, 11, 12)


def _rows(name: str, result: str = "") -> list[dict[str, Any]]:
    content = stored.read(name)
    found: list[dict[str, Any]] = (
        content["settings"]["results"][result]["rows"] if result else content["rows"]
    )
    return found


def _step(name: str, result: str, case: str) -> float:
    (found,) = (row["mean ms"] for row in _rows(name, result) if row["case"] == case)
    return float(found)


def speeds() -> Iterator[tuple[str, str]]:
    """Ratios of steps on a GPU."""
    zero = _step(RIVALS, "exact_1x8192", "ZeRO, no overflow check, 1x8192")
    exact = _step(RIVALS, "exact_1x8192", "ours, exact, 1x8192")
    offload = _step(RIVALS, "rivals", "ZeRO-Offload, 1x8192")
    predictive = _step(RIVALS, "rivals", "ours, 1x8192")
    drawn = (
        f"{exact:,.0f} ms with the exact rule, {offload:,.0f} with ZeRO-Offload, "
        f"{zero:,.0f} without offload"
    )
    for page in ("README.md", "docs/README.md"):
        yield page, f"steps, {offload / exact:.1f} times as fast as ZeRO-Offload**"
        yield page, drawn
    third = _step(DEFAULT, "exact", "ZeRO-Offload, stage 3, 1x8192") / _step(
        DEFAULT, "exact", "ours, exact, stage 3, 1x8192"
    )
    yield "README.md", f"at ZeRO-3 {third:.1f} times, `6390d265`"
    larger = _step(RIVALS, "exact_4x8192", "ZeRO-Offload, 4x8192") / _step(
        RIVALS, "exact_4x8192", "ours, 4x8192"
    )
    page = "docs/results.md"
    yield page, f"With the same numerics {offload / exact:.1f} times as fast as ZeRO-Offload"
    yield page, f"{offload / predictive:.1f} times as fast, {larger:.1f} times at 32,768 tokens"
    batches = {
        "default_1x2048": "1x2048",
        "default_1x8192": "1x8192",
        "decoder_step-1-5b-4x8192": "4x8192",
    }
    by_batch = (
        _step(DEFAULT, result, f"ZeRO, no overflow check, {batch}")
        / _step(DEFAULT, result, f"ours, {batch}")
        for result, batch in batches.items()
    )
    yield page, "over that without offload: {:.2f}, {:.2f} and {:.2f}.".format(*by_batch)


def _commit(task: str, rule: str, setting: str = "base") -> str:
    name = f"numerics/{task}__{rule}__{setting}__seed{SEEDS[0]}.json"
    return str(stored.read(name)["made"]["commit"])


def _away(task: str, rule: str, setting: str = "base") -> str:
    """A rule's loss over AdamW's of the same seed, in percent, by seed."""

    def loss(of: str, seed: int) -> float:
        name = f"numerics/{task}__{of}__{setting}__seed{seed}.json"
        return statistics.mean(stored.read(name)["losses"][-LAST:])

    found = (100 * (loss(rule, seed) / loss("adamw", seed) - 1) for seed in SEEDS)
    return ", ".join(f"{each:.1f}" for each in found) + " %"


def losses() -> Iterator[tuple[str, str]]:
    """Losses beside AdamW's, from scratch."""
    page, ours = "docs/results.md", "ours-1-dithered"
    for setting in ("base", "steps-2000"):
        both = (_away("bytes-1m", rule, setting) for rule in (ours, "nadam"))
        yield page, f"`{_commit('bytes-1m', ours, setting)}` | {' | '.join(both)}"
    yield page, f"`{_commit('bytes-5m', ours)}` | {_away('bytes-5m', ours)} | not run"
    ends = {
        (row["variant"], row["seed"]): statistics.mean(row["losses"][-LAST:])
        for row in _rows("gpu_h200.json", "losses_100m")
    }
    found = (
        100 * (ends["predictive, interval 1", seed] / ends["AdamW (ZeRO-2)", seed] - 1)
        for seed in range(3)
    )
    shown = ", ".join(f"{each:.1f}" for each in found)
    yield page, f"{shown} % (steps 250 to 300)"
    yield "docs/results/gpu.md", f"**{shown} %**"
    content = stored.read("zenflow_convergence_epyc2core_202611.json")
    for check in content["settings"]["acceptance"]:  # interval 4 is a mode that is gone
        name = check["check"]
        if not name.startswith("predictive, interval 4") and "initialize" not in name:
            cells = (name, check["must"], check["reached"])
            yield "docs/results/convergence.md", f"| {' | '.join(cells)} |"


def fine_tune() -> Iterator[tuple[str, str]]:
    """Held-out losses of the fine-tune."""
    base, page = "AdamW (ZeRO-Offload)", "docs/results/finetune.md"
    ends: dict[str, dict[int, float]] = {}
    for row in stored.read("finetune_smollm2.json"):
        ends.setdefault(row["way"], {})[row["seed"]] = row["held_out"][-1]
    below = []
    for way, by_seed in ends.items():
        away = [by_seed[seed] / ends[base][seed] - 1 for seed in sorted(by_seed)]
        listed = ", ".join(f"{by_seed[seed]:.4f}" for seed in sorted(by_seed))
        spread = f" ({min(away):+.3%} to {max(away):+.3%})".replace("%", " %")
        beside = f"{statistics.mean(away):+.3%}".replace("%", " %") + spread * (len(away) > 1)
        yield page, f"| {way} | {listed} | {'' if way == base else beside + ' '}|"
        if way.startswith("predictive"):
            below.append(-100 * statistics.mean(away))
    own = ends[base].values()
    yield (
        "docs/results.md",
        f"ends {min(below):.2f} to {max(below):.2f} % below AdamW's held-out loss; AdamW's own "
        f"seeds are {100 * (max(own) / min(own) - 1):.1f} % apart",
    )


def _spread(value: dict[str, float], digits: int = 2) -> str:
    least, most = (f"{value[key]:.{digits}f}" for key in ("min", "max"))
    return f"{value['median']:.{digits}f} ({least} to {most})"


def passes() -> Iterator[tuple[str, str]]:
    """The worker's pass over torch's fused AdamW, on a quiet Xeon, and kernels beside torch's
    operations."""
    content = stored.read("cpu_adam_quiet_xeon2core_202611.json")
    ratios: dict[str, list[dict[str, float]]] = {"1": [], "4": []}
    for each in content["comparisons"]:
        subject, _, interval = each["subject"].rpartition(", interval ")
        if each["rival"] == "torch fused AdamW" and subject.startswith("CPU Adam"):
            ratios[interval].append(each["ratio"])
    for one, four in zip(ratios["1"], ratios["4"], strict=True):
        yield "docs/results/cpu_adam.md", f"| {_spread(one)} |"
        yield "docs/results/cpu_adam.md", f"| {_spread(four)} |"
    rows = _rows(DEFAULT, "kernels")
    kept = ("predict", "share step")
    slower = [row["torch / kernel"] for row in rows if row["kernel"].startswith(kept)]
    yield "docs/results.md", f"between 1/{max(slower):.0f} and 1/{min(slower):.1f} of their time"
    first, fourth = ([each["median"] for each in ratios[key]] for key in ("1", "4"))
    yield (
        "docs/results.md",
        f"{min(first):.2f} to {max(first):.2f} at interval 1, {min(fourth):.2f} to "
        f"{max(fourth):.2f} per step at interval 4",
    )


def binding() -> Iterator[tuple[str, str]]:
    """Steps by the way in which cores are bound."""
    bound = {}
    for row in _rows("binding_quiet_xeon2core_202611.json"):
        if row["part"] in ("offload", "upstream", "ours") and row["way"] != "ours, tuned":
            cells = f"{_spread(row['step ms'])} | {row['ratio']:.2f} | {row['practicality']:.2f} |"
            yield "docs/results/core_binding.md", f"| {row['way']} | {cells}"
            bound[row["part"], row["way"]] = row["ratio"]
    offload, ours = (bound[part, "ours, all threads"] for part in ("offload", "ours"))
    yield (
        "docs/results.md",
        f"ZeRO-Offload takes {offload:.2f} and our ZenFlow {ours:.2f} of the time on two cores",
    )


def said() -> Iterator[tuple[str, str]]:
    """Everything, as page and words."""
    for part in (speeds, losses, fine_tune, passes, binding):
        yield from part()


def missing(pages: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """What its page lacks, as page and words.

    Args:
        pages: texts in place of the pages' own, by page.
    """
    found = []
    for page, words in said():
        text = (pages or {}).get(page) or (ROOT / page).read_text()
        if " ".join(words.split()) not in " ".join(text.split()):
            found.append((page, words))
    return found


if __name__ == "__main__":
    absent = missing()
    for shown in said():
        sys.stdout.write(f"{': '.join(shown)}: {'MISSING' if shown in absent else 'there'}\n")
