"""Small covers of large test matrices."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def cover(cases: list[tuple], strength: int = 2) -> list[tuple]:
    """A small subset of `cases` in which every pair (triple, ...) of settings that occurs in them
    occurs (greedy)."""
    places = list(itertools.combinations(range(len(cases[0])), strength))
    numbers: dict[tuple, int] = {}
    table = np.array(
        [
            [
                numbers.setdefault((place, tuple(case[axis] for axis in place)), len(numbers))
                for place in places
            ]
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
    return [
        case if case in needed else pytest.param(*case, marks=pytest.mark.full) for case in cases
    ]


def beyond_the_sample(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What `make test` leaves out of each test function marked ``sampled``.

    ``sampled(n)`` runs one case in n, rounded up; ``sampled()`` so few that each value of each
    setting that occurs in `items` is in one of them. The hash of a case's name chooses, so that no
    value of a setting is left out because of its place in a list.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for same in cases.values():
        mark = same[0].get_closest_marker("sampled")
        assert mark is not None
        same.sort(key=_hash)
        chosen = same[: -(-len(same) // mark.args[0])] if mark.args else _each_value(same)
        left_out.update(set(same) - set(chosen))
    return left_out


_ALONE = SimpleNamespace(params={})
"""The settings of a test that has none."""


def _each_value(same: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of one function in which each value of each of its settings occurs (greedy)."""
    settings = [getattr(item, "callspec", _ALONE).params for item in same]
    rows = [tuple((name, _named(each[name])) for name in each) for each in settings]
    if not rows[0]:
        return same
    chosen = cover(rows, strength=1)
    return [item for item, row in zip(same, rows, strict=True) if row in chosen]


def _named(value: Any) -> Any:
    """A setting's value, or what tells it from others if it is or holds a table or a list."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def beyond_one_in(number: int, items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """All but about one in `number`, chosen by the hash of their names: where a test stands chooses
    nothing, so that no other test's coming or going changes what runs, and no setting is always
    left out."""
    return {item for item in items if int.from_bytes(_hash(item), "big") % number}


def _hash(item: pytest.Item) -> bytes:
    return hashlib.sha256(item.nodeid.encode()).digest()
