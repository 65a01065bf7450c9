"""The parts of `make bench-gpu`: what a machine with one accelerator has still to answer.

What is worth most comes first: what the buyer of a card of 24 GB runs. There ways follow each
other, because no two fit. What stands beside each other in one part is measured in turns, so it
must fit on an H100 of 80 GB and a host of 126 GiB together (`tests.perf.bench_decoder`). There a
parked ZeRO-2 of 1.5 billion parameters holds about 22 GiB and takes 31 to 35 in its turn, ours 7
and 12 to 25; on the host ours holds 18 GiB, ZeRO-Offload 32. What was measured before is in
docs/results/gpu.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.perf import bench_decoder, gpu_time
from tests.perf import decoder_ways as ways
from tests.perf.decoder_ways import SMALL_CARD, Way
from tests.perf.part import Part, operators

PARAMETERS = {"1.5b": 1.5e9, "3b": 3e9, "7b": 6.74e9}
USUAL, LONGER, ACCUMULATED = "1x8192", "4x8192", "8x4096"
CARD_GIB = 24
TOY_MODEL = {"1.5b": "toy", "3b": "toy", "7b": "7m"}
"""In place of 7 billion parameters a thousandth of them."""
TOY_BATCHES = {USUAL: "1x64", LONGER: "2x64", ACCUMULATED: "8x16"}
LIMIT_OVER_USUAL, LEAST_LIMIT = 3, 60.0
"""A way may take this many times as long to start, to warm up, or in a turn, and is ended then."""


def slug(name: str) -> str:
    """`name` in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parts() -> list[Part]:
    """All of them, what is worth most first."""
    exact, predictive = SMALL_CARD["exact", "int8"], SMALL_CARD["predictive", "int8"]
    no_offload, ours, offload = (
        way.accumulating(ways.MICRO_STEPS) for way in (ways.ZERO, ways.OURS, ways.ZERO_OFFLOAD)
    )
    of_small_card = f"on a card of {CARD_GIB} GB, 8-bit moments, gradients on the host"
    return [
        operators("operators"),
        _decoder(
            "7b/exact",
            "7b",
            (exact,),
            (USUAL, LONGER),
            f"7 billion parameters {of_small_card}",
            turns=1,
            steps=10,
            card=CARD_GIB,
        ),
        _decoder(
            "equal/3b",
            "3b",
            (predictive, ways.ZERO_OFFLOAD, ways.TORCHAO_8_BIT, ways.FSDP2),
            (USUAL,),
            f"ours and rivals, each on a card of {CARD_GIB} GB",
            turns=1,
            steps=5,
            card=CARD_GIB,
        ),
        _decoder(
            "step/1.5b",
            "1.5b",
            (ways.ZERO, ways.OURS, ways.OURS_NOT_TUNED, ways.OURS_EXACT, ways.ZERO_OFFLOAD),
            (USUAL,),
            "ours by default, untuned and exact, beside ZeRO-2 and ZeRO-Offload",
        ),
        _decoder(
            "accumulation/1.5b",
            "1.5b",
            (no_offload, ours, ways.OURS_EXACT.accumulating(ways.MICRO_STEPS), offload),
            (ACCUMULATED,),
            f"{ways.MICRO_STEPS} micro-steps in a step",
            turns=1,
            steps=5,
        ),
        _losses(),
        *_beyond_two_calls(),
    ]


def _beyond_two_calls() -> list[Part]:
    fp32 = tuple(SMALL_CARD[rule, "float32"] for rule in ("exact", "predictive"))
    return [
        _decoder(
            "7b/predictive",
            "7b",
            (SMALL_CARD["predictive", "int8"],),
            (USUAL, LONGER),
            "the same with the predictive rule",
            turns=1,
            steps=10,
            card=CARD_GIB,
        ),
        _decoder(
            "equal/more",
            "3b",
            (*fp32, ways.TORCHAO, ways.ZERO_OFFLOAD_OVERLAP),
            (USUAL,),
            "as equal/3b: ours with moments in fp32, other forms of the rivals",
            turns=1,
            steps=10,
            card=CARD_GIB,
        ),
    ]


def _decoder(
    name: str,
    model: str,
    chosen: Sequence[Way],
    batches: Sequence[str],
    covers: str,
    *,
    turns: int = 3,
    steps: int = 10,
    card: int = 0,
) -> Part:
    """Steps of ways, with limits of each way from the model of time."""
    result = f"decoder_{slug(name)}"
    tokens = [rows * length for rows, length in map(bench_decoder.batch_of, batches)]
    parameters = PARAMETERS[model]
    starts = [gpu_time.start(parameters, way) for way in chosen]
    warm_ups = [way.warm_up * gpu_time.step(parameters, tokens[0], way, False) for way in chosen]
    longest = [gpu_time.step(parameters, max(tokens), way, False) for way in chosen]
    made = steps + bench_decoder.SETTLING_STEPS + 1
    limits = [
        str(round(max(LEAST_LIMIT, LIMIT_OVER_USUAL * seconds)))
        for seconds in (max(starts), max(warm_ups), made * max(longest))
    ]
    common = ("--ways", *(way.name for way in chosen))
    common += ("--card", str(card)) if card else ()
    steps_made = turns * (steps + 1) + bench_decoder.SETTLING_STEPS
    usual = gpu_time.decoder(parameters, tokens, steps_made, chosen, bool(card))
    real = ("--model", model, "--batches", *batches, "--turns", str(turns), "--steps", str(steps))
    small = [TOY_BATCHES[batch] for batch in batches]
    toy = ("--model", TOY_MODEL[model], "--batches", *small, "--turns", "1", "--steps", "2")
    return Part(
        name,
        "tests.perf.bench_decoder",
        (*common, *real, "--limits", *limits, "--name", result),
        (*common, *toy, "--warm-up", "2", "--name", f"{result}_toy"),
        1.5 * usual + 60,
        result,
        f"{result}_toy",
        usual=usual,
        covers=covers,
    )


def _losses() -> Part:
    rows = ("--rows", "AdamW", "predictive", "--seeds", "1")
    return Part(
        "losses",
        "tests.perf.bench_convergence",
        (*rows, "--model", "100m", "--steps", "200", "--rates", "1e-3", "--reuse"),
        ("--rows", "AdamW", "--seeds", "1", "--quick", "--reuse"),
        200,
        "convergence_100m",
        "convergence_quick",
        usual=gpu_time.convergence(1e8, 16 * 512, steps=200, rows=2),
        covers="losses of a byte model of 100 million parameters: AdamW and ours",
    )


def step_tables(results: dict[str, Any]) -> list[str]:
    """A table for each file of steps."""
    return [
        f"{name}\n\n{bench_decoder.table(kept['rows'])}"
        for name, kept in results.items()
        if name.startswith("decoder_") and kept["rows"]
    ]
