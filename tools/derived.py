"""Figures of pages that follow from stored measurements: sentences and lines of tables as the rows
give them (most lines: tools.tables), which the pages must have word by word.

    python -m tools.derived     # each with its page, and whether the page has it
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import cache

from studies.numerics.analysis import gap_of
from studies.numerics.rows import Row
from tools import figures, stored, tables
from tools.architecture import ROOT

__all__ = ["missing", "said"]

RIVALS, DEFAULT = "gpu_h200_rivals.json", "gpu_h200_default.json"
LAST = 50
"""Steps at the end of a run whose mean loss is compared."""
SEEDS = (10, 11, 12)


def _step(name: str, result: str, case: str) -> float:
    (found,) = (row["mean ms"] for row in tables.rows(name, result) if row["case"] == case)
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


def gpu_sentences() -> Iterator[tuple[str, str]]:
    """Ratios in the sentences of the page of GPUs."""
    page, zero = "docs/results/gpu.md", "ZeRO, no overflow check"
    cases = (
        *(("default_1x2048", "1x2048"), ("default_1x8192", "1x8192")),
        ("decoder_step-1-5b-4x8192", "4x8192"),
    )
    first, second, third = (
        _step(DEFAULT, result, f"ours, {batch}") / _step(DEFAULT, result, f"{zero}, {batch}")
        for result, batch in cases
    )
    yield page, f"the default took {first:.2f}, {second:.2f} and {third:.2f} of the time of ZeRO-2"
    ours, offload, fsdp, torchao = (
        _step(RIVALS, "rivals", f"{way}, 1x8192")
        for way in (
            *("ours", "ZeRO-Offload", "FSDP2, CPUOffloadPolicy"),
            "torchao CPUOffloadOptimizer, full bf16",
        )
    )
    of_offload, of_fsdp = f"{ours / offload:.2f}", f"{ours / fsdp:.2f}"
    of_torchao = f"{ours / torchao:.2f}"
    yield (
        page,
        f"{of_offload} of ZeRO-Offload's, {of_fsdp} of FSDP2's and {of_torchao} of torchao's",
    )
    yield page, f"It is {of_offload} of ZeRO-Offload, {of_fsdp} of FSDP2, {of_torchao} of torchao"
    exact = _step(RIVALS, "exact_1x8192", "ours, exact, 1x8192")
    early = _step(RIVALS, "exact_1x8192", "ours, exact, weights in forward, 1x8192")
    large = _step(RIVALS, "exact_4x8192", "ours, exact, weights in forward, 4x8192")
    large /= _step(RIVALS, "exact_4x8192", "ZeRO-Offload, 4x8192")
    yield page, f"Exact AdamW takes {exact / offload:.2f} of ZeRO-Offload's time**; with weights"
    yield page, f"gone at stage 2, {early / offload:.2f} and {large:.2f}"
    over = [
        _step(DEFAULT, "exact", f"ours, exact, stage 3, {batch}")
        / _step(DEFAULT, "exact", f"{way}, stage 3, {batch}")
        for way in ("ZeRO-Offload", "ours, 14/2")
        for batch in ("1x8192", "4x8192")
    ]
    ratios = (
        "takes {:.2f} and {:.2f} of ZeRO-Offload's time, and {:.2f} and {:.2f} of the predictive"
    )
    yield page, ratios.format(*over)


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
        for row in tables.rows("gpu_h200.json", "losses_100m")
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
        if not name.startswith("predictive, interval 4"):
            cells = (name, check["must"], check["reached"])
            yield "docs/results/convergence.md", f"| {' | '.join(cells)} |"


def fine_tune() -> Iterator[tuple[str, str]]:
    """Held-out losses of the fine-tune."""
    base, page = "AdamW (ZeRO-Offload)", "docs/results/finetune.md"
    ends: dict[str, dict[int, float]] = {}
    for row in stored.read("finetune_smollm2.json"):
        ends.setdefault(row["way"], {})[row["seed"]] = row["held_out"][-1]
    before = {row["held_out"][0] for row in stored.read("finetune_smollm2.json")}
    yield page, f"| before | {', '.join(f'{loss:.4f}' for loss in sorted(before))} | |"
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


def passes() -> Iterator[tuple[str, str]]:
    """The worker's pass over torch's fused AdamW, on a quiet Xeon, and kernels beside torch's
    operations."""
    content = stored.read("cpu_adam_quiet_xeon2core_202611.json")
    ratios: dict[str, list[dict[str, float]]] = {"1": [], "4": []}
    for each in content["comparisons"]:
        subject, _, interval = each["subject"].rpartition(", interval ")
        if each["rival"] == "torch fused AdamW" and subject.startswith("CPU Adam"):
            ratios[interval].append(each["ratio"])
    rows = tables.rows(DEFAULT, "kernels")
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
    for row in tables.rows("binding_quiet_xeon2core_202611.json"):
        if row["part"] in ("offload", "upstream", "ours") and row["way"] != "ours, tuned":
            ratios = f"{row['ratio']:.2f} | {row['practicality']:.2f}"
            line = f"| {row['way']} | {tables.spread(row['step ms'])} | {ratios} |"
            yield "docs/results/core_binding.md", line
            bound[row["part"], row["way"]] = row["ratio"]
    ways = ("taskset, OMP_NUM_THREADS", "upstream, in code", "ours, all threads")
    launched, called, own = (f"{bound['offload', way]:.2f}" for way in ways)
    theirs, mine = (
        ", ".join(f"{bound[part, way]:.2f}" for way in ways) for part in ("upstream", "ours")
    )
    yield (
        "docs/results/core_binding.md",
        f"ZeRO-Offload takes {launched} bound at launch, {called} by upstream's calls, {own} by "
        f"ours; DeepSpeed's ZenFlow {theirs}; our ZenFlow {mine}.",
    )
    offload, ours = (bound[part, "ours, all threads"] for part in ("offload", "ours"))
    yield (
        "docs/results.md",
        f"ZeRO-Offload takes {offload:.2f} and our ZenFlow {ours:.2f} of the time on two cores",
    )


def shares() -> Iterator[tuple[str, str]]:
    """Of the optimizer on the GPU, and memory, with the default."""
    page = "docs/results.md"

    def on_gpu(name: str, result: str, case: str, parameters: float) -> float:
        (down,) = (row["bytes down"] for row in tables.rows(name, result) if row["case"] == case)
        return 100 - 50 * float(down) / parameters

    small, large = figures.PARAMETERS["1.5b"], figures.PARAMETERS["7b"]
    first, second, third = (
        on_gpu(DEFAULT, result, f"ours, {batch}", small)
        for result, batch in (
            *(("default_1x2048", "1x2048"), ("default_1x8192", "1x8192")),
            ("decoder_step-1-5b-4x8192", "4x8192"),
        )
    )
    assert (first, round(third)) == (100, 0)
    yield page, f"It chose to step all, {second:.0f} % and none of the optimizer on the GPU"
    varied = (
        row["deviation ms"] / row["mean ms"] for row in tables.rows(DEFAULT, "default_1x2048")
    )
    yield page, f"bound by launches, and vary by up to {max(varied):.0%}".replace("%", " %")
    short, long = tables.rows(RIVALS, "7b")
    memory = f"{short['device GiB']:.1f} and {long['device GiB']:.1f} GiB of the GPU"
    share = on_gpu(RIVALS, "7b", "ours, stage 3, 1x8192", large)
    yield page, f"{memory}, {long['host GiB']:.1f} of the host. It stepped {share:.0f} % on the GPU"
    (row,) = tables.rows(DEFAULT, "7b")
    yield page, f"ms, {row['device GiB']:.1f} and {row['host GiB']:.1f} GiB. ZeRO-Offload"
    passes = [
        28 * small / row["worker ms"] / 1e6
        for row in tables.rows("gpu.json", "offload_step_1.5b")
        if row["variant"] == "predictive, interval 1"
    ]
    yield page, f"On the H100, 8 cores moved {min(passes):.0f} to {max(passes):.0f} GB/s"


def gaps() -> Iterator[tuple[str, str]]:
    """What intervals, starts and Lion cost, in percent of AdamW's loss."""
    page, later = "docs/results.md", (10, 11, 12)

    def gap(
        task: str, rule: str, setting: str = "base", seeds: tuple[int, ...] = (0, 1, 2)
    ) -> float:
        found = (gap_of(Row(task, rule, setting, seed)) for seed in seeds)
        return statistics.mean(each for each in found if each is not None)

    dithered = gap("bytes-1m", "ours-4-dithered", "batch-4x", later)
    nearest = gap("bytes-1m", "ours-4", "batch-4x")
    yield page, f"({dithered:+.1f} % with dithered estimates, {nearest:+.1f} % before)"
    yield page, f"({gap('bytes-5m', 'ours-4'):+.1f} % with the old start)"
    yield page, f"interval 8 ({gap('bytes-1m', 'ours-8'):+.1f} %)"
    further = max(
        gap(*case, seeds=later) - gap(case[0], "ours-1-dithered", case[2], later)
        for case in (
            ("reactions", "ours-1-dithered-from-10", "steps-100"),
            ("bytes-1m", "ours-1-dithered-from-10", "base"),
            ("bytes-1m", "ours-1-dithered-from-10", "beta2-0.999"),
            ("bytes-5m", "ours-1-dithered-from-10", "base"),
        )
    )
    yield page, f"at most {further:.1f} points further above AdamW than runs with 40"
    yield (
        page,
        f"interval 1 was {gap('bytes-5m', 'ours-1', seeds=tuple(range(6))):.1f} % above AdamW",
    )
    ends = [
        statistics.mean(row["losses"][250:]) for row in tables.rows("gpu.json", "convergence_100m")
    ]  # ours, interval 4, AdamW; the second seed: AdamW, ours
    above = (100 * (ours / adamw - 1) for ours, adamw in ((ends[0], ends[2]), (ends[4], ends[3])))
    yield page, "{:.1f} and {:.1f} % above it at 99 million".format(*above)
    lion, signs = gap("bytes-1m", "lion-delay"), gap("bytes-1m", "lion-signs")
    yield page, f"a plain delay costs {lion:.1f} %, one bit of sign per element {signs:.1f} %"


def beginnings() -> Iterator[tuple[str, str]]:
    """Memory and seconds of starts, gathers and saves."""
    page, name = "docs/results.md", "startup_gather_xeon2core_202611.json"
    peaks = {row["variant"]: row["peak / P"]["median"] for row in tables.rows(name, "startup")}
    comparisons = stored.read(name)["settings"]["results"]["startup"]["comparisons"]
    slower = [
        each["ratio"]["median"]
        for each in comparisons
        if each["quantity"].startswith("seconds")
        and each["rival"] == "upstream host path"
        and each["subject"].endswith(("tier distributed", "tier host"))
    ]
    yield (
        page,
        f"at most {peaks['accelerator']:.1f} times as much device memory with the tier "
        f"`accelerator` and in DeepSpeed, {peaks['distributed']:.1f} with `distributed`, "
        f"{peaks['host']:.1f} with `host`, and the last two {min(slower):.1f} to "
        f"{max(slower):.1f} times as long",
    )
    fetched = {
        row["variant"]: row["fetch peak / bytes"] for row in tables.rows(name, "gather_large")
    }
    ours, theirs = fetched["ours"], fetched["upstream coalesced"]
    yield page, f"{ours:.3f} of a block's bytes, {theirs:.3f} with DeepSpeed's coalesced path"
    offload, plain, beside = (row["stood still s"] for row in tables.rows("cpu.json", "save"))
    yield (
        page,
        f"stood still for {plain:.2f} s with 32 million parameters, {beside:.2f} s with "
        f"`async_save`; with ZeRO-Offload, which does not wait for the disk, {offload:.2f} s",
    )


@cache
def said() -> tuple[tuple[str, str], ...]:
    """Everything, as page and words."""
    measured = (speeds, gpu_sentences, shares, losses, gaps, fine_tune, passes, binding, beginnings)
    return tuple(found for part in (*measured, tables.lines) for found in part())


def plain(text: str) -> str:
    """Without bold letters and line breaks."""
    return " ".join(text.replace("**", "").split())


def missing(pages: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """What its page lacks, as page and words.

    Args:
        pages: texts in place of the pages' own, by page.
    """
    found = []
    for page, words in said():
        text = (pages or {}).get(page) or (ROOT / page).read_text()
        if plain(words) not in plain(text):
            found.append((page, words))
    return found


if __name__ == "__main__":
    absent = missing()
    for shown in said():
        sys.stdout.write(f"{': '.join(shown)}: {'MISSING' if shown in absent else 'there'}\n")
