"""Every place where the package orders the work of a device is found, and can be removed alone."""

from __future__ import annotations

import ast

from tests.mutations.sites import sites, without
from tests.support.paths import ROOT


def test_a_removed_wait_leaves_a_file_that_differs_by_it_alone() -> None:
    assert len(sites()) > 15
    for site in sites():
        source = (ROOT / "deepspeed_ext" / site.path).read_text()
        removed = without(site, source)
        ast.parse(removed)
        kept, left = source.splitlines(), removed.splitlines()
        first, last = site.lines
        assert left[: first - 1] == kept[: first - 1]
        assert left[first - 1].strip() == "pass"
        assert left[first:] == kept[last:]
