"""Every place where the package orders the work of a device is found, and the table says what
notices if it goes."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutations.run import NOT_NOTICED, REDUNDANT, TABLE, TESTS, read_table
from tests.mutations.sites import sites, without
from tests.support.paths import ROOT


def test_the_table_has_a_row_for_every_wait() -> None:
    table, found = read_table(), [site.name for site in sites()]
    assert list(table) == found, "python -m tests.mutations.run --write-docs"
    assert NOT_NOTICED not in table.values(), (
        f"a test is missing, or the wait is needless: see {TABLE}"
    )
    for beginning in REDUNDANT:
        assert any(name.startswith(beginning) for name in found), f"{beginning} is no wait any more"


def test_the_tests_that_may_notice_exist() -> None:
    assert [name for name in TESTS if not (ROOT / name.partition("::")[0]).exists()] == []


WAITS = """
def step(device, link, works):
    device.current_stream().wait_stream(link.stream)
    source.record_stream(link.stream)
    get_accelerator().synchronize()
    for work in works:
        work.wait()
    link.stream.synchronize()
    link.stream.synchronize()
    link.wait()
    process.wait()
"""


def test_waits_for_a_device_are_found_and_those_for_a_process_are_not(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(WAITS)
    assert [site.name for site in sites(tmp_path)] == [
        "some.py:step: device.current_stream().wait_stream(link.stream)",
        "some.py:step: source.record_stream(link.stream)",
        "some.py:step: get_accelerator().synchronize()",
        "some.py:step: work.wait()",
        "some.py:step: link.stream.synchronize()",
        "some.py:step: link.stream.synchronize() (2)",
    ]


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
