"""The parts of `make bench-gpu`: all that a machine with one accelerator can measure.

What is worth most comes first; half an hour has room for all up to the losses, in calls of ten
minutes. What stands beside each other in one part is measured in turns, so it must fit on an H100
of 80 GB and a host of 126 GiB together (`tests.perf.bench_decoder`). There a parked ZeRO-2 of 1.5
billion parameters holds about 22 GiB and takes 31 to 35 in its turn, ours 7 and 12 to 21; on the
host ours holds 18 GiB, ZeRO-Offload 32, DeepSpeed's ZenFlow 70.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.perf import bench_decoder, gpu_time
from tests.perf import decoder_ways as ways
from tests.perf.decoder_ways import WAYS, Way
from tests.perf.part import Part, operators

PARAMETERS = {"1.5b": 1.5e9, "7b": 6.74e9}
TURNS, STEPS = 3, 10
SHORT, MIDDLE, USUAL, LONG, LONGER = "1x2048", "1x4096", "1x8192", "1x16384", "4x8192"
TOY_MODEL = {"1.5b": "toy", "7b": "7m"}
"""In place of 7 billion parameters a thousandth of them."""
TOY_BATCHES = {SHORT: "1x32", MIDDLE: "1x48", USUAL: "1x64", LONG: "1x128", LONGER: "2x64"}


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them, what is worth most first."""
    return [
        operators("operators"),
        _link(),
        *(_beside_zero(batch) for batch in (USUAL, SHORT, LONGER)),
        _exact(USUAL),
        _decoder(
            "step/1.5b/zero",
            "1.5b",
            (ways.ZERO, ways.ZERO_UNCHECKED, ways.ZERO_OFFLOAD),
            (USUAL, SHORT),
            "ZeRO-2 with and without its overflow check, and ZeRO-Offload",
        ),
        _alone(ways.OURS.at(3), (USUAL, LONG)),
        _alone(ways.ZERO_OFFLOAD.at(3), (USUAL,)),
        *_rivals(),
        _startup(7000),
        _gather(),
        _convergence(),
        *_beyond_half_an_hour(),
    ]


def _rivals() -> list[Part]:
    super_offload, zenflow, *others = ways.RIVALS
    amp = WAYS["torchao CPUOffloadOptimizer, AMP"]
    return [
        _decoder(
            "rivals/offload",
            "1.5b",
            (ways.OURS, ways.ZERO_OFFLOAD, *(way for way in others if way != amp)),
            (USUAL,),
            "ours beside torchao, FSDP2 and FlashOptim",
        ),
        _decoder(
            "rivals/super",
            "1.5b",
            (ways.OURS, super_offload, amp),
            (USUAL,),
            "ours beside SuperOffload",
        ),
        _decoder(
            "rivals/zenflow",
            "1.5b",
            (ways.OURS, zenflow),
            (USUAL,),
            "ours beside DeepSpeed's ZenFlow",
        ),
    ]


def _beyond_half_an_hour() -> list[Part]:
    return [
        _alone(ways.OURS_14_BF16.at(3), (USUAL,)),
        _decoder(
            "ratio",
            "1.5b",
            (ways.OURS, ways.OURS_INT8, *ways.OURS_SHARED),
            (SHORT,),
            "a part of the optimizer on the device, chosen and given",
        ),
        _alone(ways.OURS_14, (USUAL,)),
        _alone(ways.ZERO_OFFLOAD, (USUAL,)),
        _decoder(
            "step/1.5b/compiled",
            "1.5b",
            [WAYS[f"{way.name}, compiled"] for way in (ways.ZERO_UNCHECKED, ways.OURS)],
            (USUAL,),
            "layers compiled by torch.compile",
        ),
        _beside_zero(MIDDLE),
        _exact(LONGER),
    ]


def _beside_zero(batch: str) -> Part:
    """Ours chooses its plan on this batch alone, as a user's run does."""
    return _decoder(
        f"step/1.5b/{batch}",
        "1.5b",
        (ways.ZERO_UNCHECKED, ways.OURS, ways.OURS_14),
        (batch,),
        "ours beside ZeRO-2",
    )


def _exact(batch: str) -> Part:
    return _decoder(
        f"step/1.5b/exact/{batch}",
        "1.5b",
        (ways.OURS, ways.OURS_EXACT, ways.ZERO_OFFLOAD),
        (batch,),
        "the exact rule beside the predictive one and ZeRO-Offload",
    )


def _link() -> Part:
    return Part(
        "link",
        "tests.perf.bandwidth",
        ("--mib", "1024"),
        ("--mib", "4"),
        120,
        "bandwidth",
        "bandwidth",
        usual=gpu_time.START_SECONDS + 5,
        covers="copies within and between device and host",
    )


def _decoder(
    name: str,
    model: str,
    chosen: Sequence[Way],
    batches: Sequence[str],
    covers: str,
    result: str = "",
) -> Part:
    result = result or f"decoder_{slug(name)}"
    names = ("--ways", *(way.name for way in chosen))
    turns = ("--turns", str(TURNS), "--steps", str(STEPS))
    toy = ("--turns", "1", "--steps", "2", "--warm-up", "2")
    small = [TOY_BATCHES[batch] for batch in batches]
    usual = gpu_time.decoder(
        PARAMETERS[model],
        [sequences * length for sequences, length in map(bench_decoder.batch_of, batches)],
        TURNS * STEPS + bench_decoder.SETTLING_STEPS,
        chosen,
    )
    return Part(
        name,
        "tests.perf.bench_decoder",
        (*names, "--model", model, "--batches", *batches, *turns, "--name", result),
        (*names, "--model", TOY_MODEL[model], "--batches", *small, *toy, "--name", f"{result}_toy"),
        1.5 * usual + 60,
        result,
        f"{result}_toy",
        usual=usual,
        covers=covers,
    )


def _alone(way: Way, batches: Sequence[str]) -> Part:
    """7 billion parameters: no two of these fit beside each other."""
    return _decoder(
        f"7b/{slug(way.name)}", "7b", (way,), batches, "7 billion parameters, alone", "decoder_7b"
    )


def _startup(millions: int) -> Part:
    name = f"startup_{millions}m_1ranks"
    return Part(
        f"startup/{millions // 1000}b",
        "tests.perf.bench_startup",
        ("--millions", str(millions), "--ranks", "1", "--repeats", "2", "--no-moments"),
        ("--millions", "1", "--ranks", "1", "--repeats", "1", "--no-moments"),
        300,
        name,
        "startup",
        usual=gpu_time.startup(millions * 1e6, repeats=2),
        covers="tiers of flattening; SGD, because Adam's moments do not fit",
    )


def _gather() -> Part:
    both = ("--ranks", "2", "--dtype", "bfloat16")
    return Part(
        "gather",
        "tests.perf.bench_gather",
        (*both, "--sizes", "medium", "large", "--repeats", "2", "--steps", "2"),
        (*both, "--sizes", "tiny", "--repeats", "1", "--steps", "1"),
        200,
        "gather",
        "gather",
        usual=60,
        covers="memory of a ZeRO-3 fetch, "
        "two ranks that share the device: their times mean nothing",
    )


def _convergence() -> Part:
    return Part(
        "losses",
        "tests.perf.bench_convergence",
        (
            "--rows",
            "adamw",
            "predictive",
            "look-ahead",
            "--seeds",
            "1",
            "--model",
            "100m",
            "--steps",
            "300",
            "--reuse",
        ),
        ("--rows", "adamw", "--seeds", "1", "--quick", "--reuse"),
        300,
        "convergence_100m",
        "convergence_quick",
        usual=gpu_time.convergence(1e8, 16 * 512, steps=300, rows=4),
        covers="losses of a byte model: AdamW, NAdam, which looks ahead, and ours",
    )


def step_tables(results: dict[str, Any]) -> list[str]:
    """A table for each file of steps."""
    return [
        f"{name}\n\n{bench_decoder.table(kept['rows'])}"
        for name, kept in results.items()
        if name.startswith("decoder_") and kept["rows"]
    ]
