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

from tests.perf import bench_decoder
from tests.perf import decoder_ways as ways
from tests.perf.decoder_ways import SMALL_CARD, Way
from tests.perf.part import Part, operators

USUAL, LONGER, ACCUMULATED = "1x8192", "4x8192", "8x4096"
CARD_GIB = 24
TOY_MODEL = {"1.5b": "toy", "3b": "toy", "7b": "7m"}
"""In place of 7 billion parameters a thousandth of them."""
TOY_BATCHES = {USUAL: "1x64", LONGER: "2x64", ACCUMULATED: "8x16"}
LIMITS = {"1.5b": (75, 100, 60), "3b": (90, 60, 60), "7b": (125, 80, 245)}
"""Seconds, three times what is expected, that a way may take to start, to warm up, and for a turn:
it is ended then."""


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
            149,
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
            166,
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
            156,
            "ours by default, untuned and exact, beside ZeRO-2 and ZeRO-Offload",
        ),
        _decoder(
            "accumulation/1.5b",
            "1.5b",
            (no_offload, ours, ways.OURS_EXACT.accumulating(ways.MICRO_STEPS), offload),
            (ACCUMULATED,),
            138,
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
            149,
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
            222,
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
    usual: float,
    covers: str,
    *,
    turns: int = 3,
    steps: int = 10,
    card: int = 0,
) -> Part:
    """Steps of ways; `usual` are seconds on an H100 with 16 cores, by arithmetic."""
    result, limits = f"decoder_{slug(name)}", LIMITS[model]
    common = ("--ways", *(way.name for way in chosen))
    common += ("--card", str(card)) if card else ()
    real = ("--model", model, "--batches", *batches, "--turns", str(turns), "--steps", str(steps))
    small = [TOY_BATCHES[batch] for batch in batches]
    toy = ("--model", TOY_MODEL[model], "--batches", *small, "--turns", "1", "--steps", "2")
    return Part(
        name,
        "tests.perf.bench_decoder",
        (*common, *real, "--limits", *map(str, limits), "--name", result),
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
        usual=43,
        covers="losses of a byte model of 100 million parameters: AdamW and ours",
    )


def step_tables(results: dict[str, Any]) -> list[str]:
    """A table for each file of steps."""
    return [
        f"{name}\n\n{bench_decoder.table(kept['rows'])}"
        for name, kept in results.items()
        if name.startswith("decoder_") and kept["rows"]
    ]
