"""Lines of tables of the results, as the stored rows give them (`tools.derived` and `tools.traced`
look for them on the pages)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from studies.numerics.analysis import Sample, gap_of, held_out_gap_of
from studies.numerics.rows import Row
from tools import stored

__all__ = ["lines", "rows", "spread"]

Rows = list[dict[str, Any]]


def rows(name: str, result: str = "") -> Rows:
    """Of a measurement, or of one result of it."""
    content = stored.read(name)
    found: Rows = content["settings"]["results"][result]["rows"] if result else content["rows"]
    return found


def _line(*cells: object) -> str:
    return "|" + "|".join(f" {cell} " if cell != "" else " " for cell in cells) + "|"


def spread(value: dict[str, float], digits: int = 2) -> str:
    """Median, smallest and largest."""
    least, most = (f"{value[key]:.{digits}f}" for key in ("min", "max"))
    return f"{value['median']:.{digits}f} ({least} to {most})"


def _comparisons(name: str, result: str = "") -> Rows:
    content = stored.read(name)
    found: Rows = (content["settings"]["results"][result] if result else content)["comparisons"]
    return found


# -- CPU -------------------------------------------------------------------------------------------


def cpu_adam() -> Iterator[str]:
    """Passes over partitions of several sizes, on two quiet machines."""
    name = "cpu_adam_quiet_xeon2core_202611.json"
    ratios = {
        each["subject"]: each["ratio"]
        for each in _comparisons(name)
        if each["rival"] == "torch fused AdamW"
    }
    by_size: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows(name):
        by_size.setdefault(row["elements"], {})[row["contender"]] = row
    for elements, of in by_size.items():
        fused, copy = of["torch fused AdamW"], of["plain copy"]
        first, fourth = of["pass, native"], of["pass, native, interval 4"]
        subject = f"CPU Adam, {elements:,} elements ({fused['size']}), interval "
        one, four = ratios[f"{subject}1"], ratios[f"{subject}4"]
        yield _line(
            f"{elements:,} ({fused['size']})",
            f"{fused['ms per step']['median']:.1f}",
            _gb(fused),
            spread(one, 2),
            _gb(first),
            spread(four, 2),
            _gb(fourth),
            f"{_over(of['DeepSpeedCPUAdam'], fused):.2f}",
            _gb(copy),
        )
    by_size = {}
    for row in rows("cpu_adam_quiet_epyc2core_202611.json"):
        by_size.setdefault(row["elements"], {})[row["contender"]] = row
    for elements, of in by_size.items():
        fused = of["torch fused AdamW"]
        passes = [of["pass, native" + each] for each in ("", *_MOMENTS)]
        passes += [of[f"pass, native{each}, interval 4"] for each in ("", *_MOMENTS)]
        yield _line(
            f"{elements:,}",
            f"{fused['ms per step']['median']:.1f}",
            _gb(fused),
            *(f"{_over(each, fused):.2f}, {_gb(each)}" for each in passes),
            _gb(of["plain copy"]),
        )


_MOMENTS = (", bf16 moments", ", int8 moments")


def _gb(row: dict[str, Any]) -> str:
    return f"{row['GB/s']['median']:.0f}"


def _over(row: dict[str, Any], other: dict[str, Any]) -> float:
    return float(row["ms per step"]["median"] / other["ms per step"]["median"])


_BEGINNINGS = "startup_gather_xeon2core_202611.json"


def flattening() -> Iterator[str]:
    """Starts of stages 1 and 2, over DeepSpeed's in the same turn."""
    ratios = {
        (each["subject"], each["rival"]): each["ratio"]
        for each in _comparisons(_BEGINNINGS, "startup")
        if each["quantity"].startswith("seconds")
    }
    for row in rows(_BEGINNINGS, "startup"):
        variant, peak = row["variant"], f"{row['peak / P']['median']:.3f}"
        begin = (row["stage"], row["offload"])
        if variant.startswith("upstream"):
            yield _line(*begin, variant, spread(row["seconds"], 3), "", peak)
            continue
        rival = f"upstream {'accelerator' if variant == 'accelerator' else 'host'} path"
        offload = " with CPU offload" if row["offload"] == "yes" else ""
        ratio = ratios[f"ZeRO-{row['stage']} start-up{offload}, tier {variant}", rival]
        cells = (f"`{variant}`", spread(row["seconds"], 3), spread(ratio, 2), peak)
        yield _line(*begin, *cells)


_WEIGHTS = {"tiny": (64, 8, ""), "small": (256, 8, ""), "medium": (1024, 6, " (4 MiB)")}
_WEIGHTS["large"] = (4096, 3, " (64 MiB)")
"""Width of a square weight, blocks, and bytes where they say something."""


def gather() -> Iterator[str]:
    """Gathers of stage 3 on two ranks, over DeepSpeed's in the same turn."""
    for result in ("gather", "gather_large"):
        both = {
            (each["subject"], each["rival"]): each["ratio"]
            for each in _comparisons(_BEGINNINGS, result)
            if each["quantity"] == "step ms"
        }
        for row in rows(_BEGINNINGS, result):
            if row["ranks"] == 2:
                yield _gather_line(row, both)


def _gather_line(row: dict[str, Any], ratios: dict[tuple[str, str], dict[str, float]]) -> str:
    width, blocks, nbytes = _WEIGHTS[row["size"]]
    subject = f"ZeRO-3 gather, 2 ranks, {blocks} blocks of {width:,} x {width:,}"
    is_first = row["variant"] == "upstream coalesced"
    return _line(
        f"{width} x {width}{nbytes}, {blocks} blocks" if is_first else "",
        row["variant"],
        spread(row["step ms"], 1),
        "" if row["variant"] == "ours" else spread(ratios[subject, row["variant"]], 2),
        f"{row['fetch peak / bytes']:.3f}",
        f"{row['forward peak MiB']:.2f}",
        row["gathers"],
    )


def step_memory() -> Iterator[str]:
    """Bytes per parameter of each way, on CPU ranks; ours has a later row."""
    for row in rows("zenflow_offload_step_epyc2core_202611.json"):
        if row["table"].startswith("memory") and row["variant"].startswith(("ZeRO", "upstream")):
            host, device = row["host B/parameter"], row["device B/parameter"]
            yield _line(row["variant"], f"{host:.2f}", "", f"{device:.2f}", "", "")


def host_memory() -> Iterator[str]:
    """Bytes per parameter between steps, of both ranks of a simulation together."""
    held = {
        row["run"]: f"{2 * float(row['between steps'].split(' / ')[1]):.1f}"
        for row in rows("memory_plan_simulated_202611.json")
        if row["place"] == "host" and row["stage"] == 2
    }
    yield _line("ZeRO-Offload", held["ZeRO-Offload"])
    (overlapped,) = (
        row["host B/parameter"]
        for row in rows("zenflow_offload_step_epyc2core_202611.json")
        if row["table"].startswith("memory") and row["variant"] == "upstream ZenFlow, overlapped"
    )
    yield _line("DeepSpeed's ZenFlow, overlapped", f"{overlapped:.1f}")
    yield _line("ours", held["predictive"])
    small = "; ".join(held[f"predictive, {dtype} moments"] for dtype in ("bf16", "int8"))
    yield _line("ours, bf16 moments; 8-bit moments", small)


def stream() -> Iterator[str]:
    """What steps wait for their optimizer, simulated."""
    found = [row for row in rows("stream_simulated_202611.json") if row["ranks"] == 1]
    for dtype, moments in (("float32", "fp32"), ("int8", "8-bit")):
        for way in ("exact", "predictive"):
            of = [row for row in found if (row["moments"], row["way"]) == (dtype, way)]
            yield _line(moments, way, *(f"{_wait(row)} ({row['off']:.1%})" for row in of))
    waits = [_wait(row) for row in found[:15] if row["way"] == "in the step"]
    yield _line("any", "`overlap_step: false`", *waits)
    key = "ZeRO-Offload, computed"
    yield _line("any", "ZeRO-Offload at best, computed", *(f"{row[key]:.2f}" for row in found[:5]))


def _wait(row: dict[str, Any]) -> str:
    return f"{row['wait'] + 1e-9:.2f}"  # stored with three digits: halves go up


# -- GPU -------------------------------------------------------------------------------------------


def kernels() -> Iterator[str]:
    """Device kernels over torch's operations, on an H200."""
    by_name: dict[str, Rows] = {}
    for row in rows("gpu_h200.json", "kernels"):
        by_name.setdefault(row["kernel"], []).append(row)
    for name in ("predict", "predict with D"):
        both = (
            (f"{row['ms']:.3f}", f"{row['GB/s']:,.0f}", f"{row['torch / kernel']:.1f} times")
            for row in by_name[name]
        )
        is_equal = all(row["equal"] for row in by_name[name])
        yield _line(name, *(cell for cells in both for cell in cells), "yes" if is_equal else "no")
    (norms,) = by_name["norms of 124 gradients"]
    yield (
        f"| {norms['kernel']}; `torch._foreach_norm` since | {norms['ms']:.3f} | "
        f"{norms['GB/s']:,.0f} | {norms['torch / kernel']:.2f} times | | | | sums in fp64 |"
    )


_WINDOWS = ((5, 10), (20, 40), (40, 100), (100, 200), (250, 300))


def losses() -> Iterator[str]:
    """Losses on an H200 beside AdamW's of the same seed, as means over steps."""
    of = {
        (row["variant"], row["seed"]): row["losses"] for row in rows("gpu_h200.json", "losses_100m")
    }
    for begin, end in _WINDOWS:
        mean = {key: statistics.mean(each[begin:end]) for key, each in of.items()}
        adamw = ", ".join(f"{mean['AdamW (ZeRO-2)', seed]:.2f}" for seed in range(3))
        cells = []
        for variant in ("", ", moments in bfloat16", ", moments in int8"):
            name = f"predictive, interval 1{variant}"
            seeds = [seed for seed in range(3) if (name, seed) in mean]
            away = (100 * (mean[name, s] / mean["AdamW (ZeRO-2)", s] - 1) for s in seeds)
            cells.append(", ".join(_signed(each) for each in away) + " %")
        second = mean["predictive, interval 2", 0] / mean["AdamW (ZeRO-2)", 0] - 1
        cells.append(f"{_signed(100 * second)} %")
        yield _line(f"{begin} to {end}", adamw, *cells)


def _signed(value: float, digits: int = 1) -> str:
    """A number that rounds to 0 has no sign."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


# -- numerics --------------------------------------------------------------------------------------


def _gaps(task: str, rule: str, setting: str) -> list[float]:
    """By seed, in percent of AdamW's loss."""
    found = (gap_of(Row(task, rule, setting, seed)) for seed in (10, 11, 12))
    return [gap for gap in found if gap is not None]


def _away(values: Sequence[float], digits: int = 1) -> str:
    """Mean, with the smallest and the largest of several."""
    least, most = (_signed(each, digits) for each in (min(values), max(values)))
    return _signed(statistics.mean(values), digits) + (
        f" ({least} to {most})" if least != most else ""
    )


_BETA2 = ("bytes-1m", "beta2-0.999")
_STATE_TASKS = {
    ("bytes-1m", "base"): "`bytes-1m`",
    _BETA2: "`bytes-1m`, beta2 of 0.999",
    ("bytes-1m", "steps-2000"): "`bytes-1m`, 2,000 steps",
    ("bytes-20m", "base"): "`bytes-20m`, one seed",
    ("bytes-5m", "base"): "`bytes-5m`",
    **{(name, "base"): f"`{name}`" for name in ("embeddings", "experts", "spikes")},
}


def small_moments() -> Iterator[str]:
    """Moments in bf16, then of 8 bits."""
    for (task, setting), name in _STATE_TASKS.items():
        cells = [_cell(task, "adamw-bf16", setting)]
        for rule in ("ours-1-bf16", "ours-1"):
            both = [_cell(task, rule + start, setting) for start in ("", "-from-40")]
            early = f"; from step 40 {both[1]}" if both[0] and both[1] else ""
            late = f"{both[1]}, from step 40" if both[1] and not both[0] else ""
            cells.append(late or both[0] + early)
        control = _gaps(task, "adamw-disturbed", setting)
        cells.append(_signed(statistics.mean(control)) if control else "")
        yield _line(name, *cells)
    for (task, setting), name in _STATE_TASKS.items():
        if setting == "steps-2000" or task == "bytes-20m":
            continue
        alone = _signed(statistics.mean(_gaps(task, "adamw-bf16", setting)))
        cells = [_cell(task, rule, setting) for rule in ("adamw-int8", "ours-1-int8-from-40")]
        yield _line(name, *cells, alone)


def _cell(task: str, rule: str, setting: str) -> str:
    found = _gaps(task, rule, setting)
    return _away(found) if found else ""


def estimates() -> Iterator[str]:
    """Dithered ones, by seed, then shorter starts, then NAdam."""
    for task, setting in (("bytes-1m", "base"), ("bytes-1m", "batch-4x"), ("bytes-5m", "base")):
        found = _gaps(task, "ours-1-dithered", setting)
        yield " | ".join(["", *map(_signed, (*found, statistics.mean(found))), "upheld |"])[1:]
    for task, setting in (
        *(("reactions", "steps-100"), ("bytes-1m", "base"), ("bytes-5m", "base"), _BETA2),
    ):
        means = []
        for start in ("-from-2", "-from-10", "-from-20", ""):
            found = _gaps(task, f"ours-1-dithered{start}", setting)
            mean = _signed(statistics.mean(found), 2) if found else ""
            means.append(
                f"{mean} (open)" if found and Sample(tuple(found)).verdict(1.0) == "open" else mean
            )
        yield " | ".join(("", *means, ""))[1:-1]
    for setting, steps in (("base", "400"), ("steps-2000", "2,000")):
        for rule, name in (("ours-1-dithered", "interval 1"), ("nadam", "NAdam")):
            seeds = (Row("bytes-1m", rule, setting, seed) for seed in (10, 11, 12))
            gaps = ((gap_of(row), held_out_gap_of(row)) for row in seeds)
            yield _line(steps, name, *(f"{_signed(a)} ({_signed(b)})" for a, b in gaps if a and b))


def lines() -> Iterator[tuple[str, str]]:
    """Everything, as page and line."""
    pages = {
        "results": (host_memory,),
        "results/cpu_adam": (cpu_adam,),
        "results/flattening": (flattening,),
        "results/gather": (gather,),
        "results/zenflow_step": (step_memory, stream),
        "results/gpu": (kernels, losses),
        "results/numerics": (small_moments, estimates),
    }
    for page, parts in pages.items():
        for part in parts:
            yield from ((f"docs/{page}.md", line) for line in part())
