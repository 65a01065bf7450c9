"""Defects of device code that the simulated accelerator shows with older versions stay mended."""

from __future__ import annotations

import importlib

import pytest

from tests.simulated.defects import OF_THE_PAST, RANKS
from tests.support.ranks import run_ranks


def see(name: str) -> tuple[bool, str]:
    # loads the simulated accelerator
    rows = importlib.import_module("tests.simulated.defect_rows").ROWS
    assert rows.keys() == RANKS.keys()
    seen = rows[name]()
    return seen.defect, seen.what


@pytest.mark.parametrize("name", [name for name in RANKS if name not in OF_THE_PAST])
def test_the_defect_does_not_show(name: str) -> None:
    for defect, what in run_ranks(RANKS[name], see, name, device="sim", pool="defects"):
        assert not defect, what
