"""Invented values: what a user, a broken tool or a mean one may write."""

from __future__ import annotations

import math
import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(
        0,
        -1,
        1,
        2,
        3,
        255,
        256,
        1 << 31,
        (1 << 31) - 1,
        1 << 32,
        1 << 63,
        (1 << 63) - 1,
        1 << 64,
        -(1 << 63),
    ),
    *(10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, 0.1, 0.999999999),
    *(math.nan, math.inf, -math.inf),
)
TEXTS = (
    *(
        "",
        " ",
        "auto",
        "none",
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "nan",
        "inf",
        "9" * 25,
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "0x10",
        "1_000",
        "٣",
        "²",
        "é",
        "\ud800",
        "\0",
        "a\nb",
        "\u202e",
        "..",
        "/",
        "../x",
        "x" * 300,
        "x" * 5000,
    ),
    *(
        "cpu",
        "nvme",
        "predictive",
        "selective",
        "float16",
        "0-3",
        "3-1",
        "0-65535",
        "0-31:2/8",
        "{}",
        "[]",
        "%s%n",
    ),
)


def text(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice([rng.randint(32, 126), rng.randint(0, 0x2FFF)]))
        for _ in range(rng.randint(0, 12))
    )


def value(rng: random.Random, depth: int = 3) -> Any:
    """Anything that JSON can hold, and a little more."""
    kind = rng.randrange(12 if depth else 8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return text(rng)
    if kind < 7:
        return rng.choice([True, False, None, rng.randint(-5, 300), rng.random()])
    if kind == 7:
        return rng.choice([[], {}, [[]], {"": {}}])
    if kind == 8 and rng.random() < 0.1:
        return nested(rng.choice([50, 2000, 100_000]), rng.random() < 0.5)
    if kind < 10:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {text(rng): value(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def nested(depth: int, lists: bool) -> Any:
    """Lists or dicts one inside the other."""
    made: Any = 1
    for _ in range(depth):
        made = [made] if lists else {"zenflow": made}
    return made
