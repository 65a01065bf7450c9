"""Every place where the package orders the work of a device is known, and the table says what notices if it goes."""

from __future__ import annotations

import ast

from tests.mutations.run import TABLE
from tests.mutations.sites import sites, without
from tests.support.paths import ROOT


def test_the_table_has_a_row_for_every_wait() -> None:
    listed = [line.split("`")[1] for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    found = [site.name for site in sites()]
    assert listed == found, "python -m tests.mutations.run --write-docs"
    assert "not noticed" not in TABLE.read_text()


def test_a_removed_wait_leaves_a_file_that_differs_by_it_alone() -> None:
    for site in sites():
        source = (ROOT / "deepspeed_ext" / site.path).read_text()
        removed = without(site, source)
        ast.parse(removed)
        kept, left = source.splitlines(), removed.splitlines()
        first, last = site.lines
        assert left[: first - 1] == kept[: first - 1]
        assert left[first - 1].strip() == "pass"
        assert left[first:] == kept[last:]
