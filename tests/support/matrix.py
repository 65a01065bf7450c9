"""Small covers of large test matrices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest


def cover(cases: list[tuple], strength: int = 2) -> list[tuple]:
    """A small subset of `cases` in which every pair (triple, ...) of settings that occurs in them occurs (greedy)."""
    places = list(itertools.combinations(range(len(cases[0])), strength))
    numbers: dict[tuple, int] = {}
    table = np.array(
        [
            [numbers.setdefault((place, tuple(case[axis] for axis in place)), len(numbers)) for place in places]
            for case in cases
        ]
    )
    missing = np.ones(len(numbers), dtype=bool)
    chosen = []
    while missing.any():
        best = int(missing[table].sum(1).argmax())
        chosen.append(cases[best])
        missing[table[best]] = False
    return chosen


def some(cases: list[tuple], strength: int = 2) -> list[Any]:
    """`cases`, of which those that a cover of pairs can spare are only run by ``--full``."""
    needed = cover(cases, strength)
    return [case if case in needed else pytest.param(*case, marks=pytest.mark.full) for case in cases]
