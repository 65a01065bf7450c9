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
    axes = [_numbered(values) for values in zip(*cases, strict=True)]
    columns, number = [], 0
    for place in itertools.combinations(axes, strength):
        together = np.zeros(len(cases), dtype=np.int64)
        for axis in place:
            together = together * len(cases) + axis
        found, column = np.unique(together, return_inverse=True)
        columns.append(column + number)
        number += len(found)
    table = np.stack(columns, axis=1)
    missing = np.ones(number, dtype=bool)
    chosen = []
    while missing.any():
        best = int(missing[table].sum(1).argmax())
        chosen.append(cases[best])
        missing[table[best]] = False
    return chosen


def _numbered(values: tuple) -> np.ndarray:
    """The number of each value among the different ones."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def some(cases: list[tuple], strength: int = 2) -> list[Any]:
    """`cases`, of which those that a cover of pairs can spare are only run by ``--full``."""
    needed = cover(cases, strength)
    return [
        case if case in needed else pytest.param(*case, marks=pytest.mark.full) for case in cases
    ]


def beyond_the_sample(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What `make test` leaves out of the test functions marked ``sampled``.

    ``sampled(n)`` runs one case in n of a function, rounded up; ``sampled("pairs")`` so many that
    every pair of values of its settings is in one of them. What is marked ``sampled()`` in a
    file is one table of properties, its functions, by variants, their settings: so few cases run
    that each property is in one of them, and each value of each setting that occurs in `items`. The
    hash of a case's name chooses, so that no value of a setting is left out because of its place in
    a list.
    """
    functions: dict[str, list[pytest.Item]] = {}
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            groups, end = (functions, "[") if mark.args else (tables, "::")
            groups.setdefault(item.nodeid.partition(end)[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for same in functions.values():
        mark = same[0].get_closest_marker("sampled")
        assert mark is not None
        same.sort(key=_hash)
        if mark.args == ("pairs",):
            left_out.update(set(same) - _each_pair(same))
        else:
            left_out.update(same[-(-len(same) // mark.args[0]) :])
    for table in tables.values():
        left_out.update(set(table) - _each_value(table))
    return left_out


_ALONE = SimpleNamespace(params={})
"""The settings of a test that has none."""


def _each_value(table: list[pytest.Item]) -> set[pytest.Item]:
    """Cases in which each function occurs, and each value of each setting (greedy)."""
    holds = {item: _function_and_values(item) for item in sorted(table, key=_hash)}
    missing = set().union(*holds.values())
    chosen = set()
    while missing:
        best = max(holds, key=lambda item: len(holds[item] & missing))
        chosen.add(best)
        missing -= holds[best]
    return chosen


def _each_pair(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Cases of a function in which each pair of values of two settings occurs (greedy)."""
    rows = {
        tuple(map(_named, getattr(case, "callspec", _ALONE).params.values())): case
        for case in cases
    }
    return {rows[row] for row in cover(list(rows))}


def _function_and_values(item: pytest.Item) -> set[tuple[str, Any]]:
    settings = getattr(item, "callspec", _ALONE).params
    function = ("", item.nodeid.partition("[")[0])
    return {function, *((name, _named(value)) for name, value in settings.items())}


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


def further_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """All cases but one of each test function; a hash chooses that one."""
    seen: set[str] = set()
    found = []
    for item in sorted(items, key=_hash):
        function = item.nodeid.partition("[")[0]
        if function in seen:
            found.append(item)
        seen.add(function)
    return found


def _hash(item: pytest.Item) -> bytes:
    return hashlib.sha256(item.nodeid.encode()).digest()
