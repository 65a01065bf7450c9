"""The README is short, and its numbers are those that were measured or are computed now."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.page_bodies import refusal_without_extension
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tools import derived, figures, front_tables, traced

pytestmark = pytest.mark.cpu(reason="it reads pages; the refusal is DeepSpeed's own")

README = (ROOT / "README.md").read_text()
FRONT = (ROOT / "docs" / "README.md").read_text()


@pytest.mark.full  # half a minute; test_fits.py computes one row of what fits
def test_the_tables_are_current() -> None:
    assert front_tables.page() == README, "run `make docs`"


def test_the_readme_is_short_and_its_table_of_steps_current() -> None:
    assert len(README.split()) <= 700
    assert front_tables.steps_table().rstrip() in README, "run `make docs`"


def test_every_figure_of_readme_and_results_is_traced_or_stands_by_hand() -> None:
    assert [found for page in traced.pages() for found in traced.untraced(page)] == []
    assert [*derived.missing(), *figures.without_commit()] == []


@pytest.mark.parametrize(
    ("page", "was", "stale"),
    [
        ("README.md", "`e31b1304`", "`af2c8adf`"),
        ("README.md", "1.8 times", "1.9 times"),
        ("docs/results.md", "for 1.43 s", "for 1.44 s"),
    ],
)
def test_a_stale_figure_and_a_wrong_commit_are_noticed(page: str, was: str, stale: str) -> None:
    assert traced.untraced(page, (ROOT / page).read_text().replace(was, stale))


def test_the_lines_that_switch_it_on_are_the_same_everywhere_and_stock_deepspeed_refuses_them() -> (
    None
):
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    (front,) = re.findall(r"```json\n(.*?)```", FRONT, re.DOTALL)
    section = json.loads(f"{{{block}}}")
    assert section == json.loads(f"{{{front}}}")
    (said,) = run_ranks(1, refusal_without_extension, section["zero_optimization"], pool="pages")
    assert "Zenflow must be used with cpu offload" in said or "update_rule" in said
    offload = {"offload_optimizer": {"device": "cpu"}}
    zero = {**section["zero_optimization"], **offload}
    (said,) = run_ranks(1, refusal_without_extension, zero, pool="pages")
    assert "update_rule" in said


def test_pages_that_the_code_names_exist() -> None:
    folders = ("deepspeed_ext", "studies", "tools", "tests")
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|svg)", path.read_text())
    }
    assert len(found) > 20
    assert not [each for each in sorted(found) if not (ROOT / each[1]).exists()]
