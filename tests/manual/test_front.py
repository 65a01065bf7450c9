"""The README is short, and its numbers are those that were measured or are computed now."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.page_bodies import refusal_without_extension
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tools import derived, figures, front_tables

pytestmark = pytest.mark.cpu(reason="it reads pages; the refusal is DeepSpeed's own")

README = (ROOT / "README.md").read_text()
FRONT = (ROOT / "docs" / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 700


@pytest.mark.full  # half a minute; test_fits.py computes one row of what fits
def test_the_tables_are_current() -> None:
    assert front_tables.page() == README, "run `make docs`"


def test_the_table_of_steps_is_current() -> None:
    assert front_tables.steps_table().rstrip() in README, "run `make docs`"


@pytest.mark.parametrize("page", figures.PAGES)
def test_every_step_that_a_page_shows_was_measured_at_a_commit_that_it_names(page: str) -> None:
    rows = figures.rows()
    assert [claim.text for claim in figures.claims(page) if not figures.row_of(claim, rows)] == []


@pytest.mark.parametrize(("was", "stale"), [("621 ms", "622 ms"), ("`e31b1304`", "`af2c8adf`")])
def test_a_stale_figure_and_a_wrong_commit_are_noticed(was: str, stale: str) -> None:
    rows, text = figures.rows(), README.replace(was, stale)
    assert [c.text for c in figures.claims("README.md", text) if not figures.row_of(c, rows)]


def test_ratios_and_losses_follow_from_stored_rows_and_pages_of_results_name_commits() -> None:
    assert derived.missing() == []
    assert derived.missing({"README.md": README.replace("1.8 times", "1.9 times")})
    assert figures.without_commit() == []


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
