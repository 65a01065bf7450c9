"""This checkout trains the bits that an earlier commit trained, and goes on from its checkpoints.

`variants.py` lists what is trained, `training.py` says why no CPU changes its bits, and `write.py`
wrote the archive. A mode that was retired need not keep its bits: its configs and checkpoints are
read, and its losses stay near the recorded ones.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.training import MIDDLE, STEPS, run
from tests.acceptance.variants import ALIKE, ROWS, VARIANTS, Row
from tests.acceptance.write import ARCHIVE, TABLE, origin
from tests.support.kernels import needs_native
from tests.support.planned import copies_as
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.sampled(), needs_native]

BITS = [row for row in ROWS if not row.variant.retired]
RETIRED = [row for row in ROWS if row.variant.retired]


def each(rows: list[Row]) -> Any:
    cases = [(row.name, row.stage, row.ranks) for row in rows]
    return pytest.mark.parametrize(("name", "stage", "ranks"), cases)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's content."""
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(folder, filter="data")
    return folder


def run_with_copies(config: dict[str, Any], *folders: str) -> dict[str, Any]:
    with copies_as(config["zero_optimization"]["zenflow"]):
        return run(config, *folders)


def train(row: Row, folder: Path, load: Path | None = None) -> list[dict[str, Any]]:
    loads, variant = str(load / str(row)) if load else "", row.variant
    how = variant.config(row.stage), str(folder), loads
    return run_ranks(row.ranks, run_with_copies, *how, device=variant.device)


def recorded(before: Path, row: Row) -> tuple[list[dict[str, Any]], str]:
    """What every rank left behind, and what it was written with, beside what runs now."""
    table = json.loads((before / TABLE).read_text())
    there, here = table["origin"], origin("this checkout")
    told = [f"{name}: {there[name]}, now {here[name]}" for name in there]
    return table["rows"][str(row)], "; ".join(told)


def first_difference(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    """The first loss that differs, else the names of digests that do; empty: nothing does."""
    pairs = zip(expected["losses"], actual["losses"], strict=True)
    for number, (one, other) in enumerate(pairs):
        if one != other:
            return f"loss {number} is {float.fromhex(other)}, was {float.fromhex(one)}"
    names = [name for name, one in expected["state"].items() if actual["state"][name] != one]
    names += [what for what in ("saved", "skipped") if expected[what] != actual[what]]
    return ", ".join(names) and f"differ: {', '.join(names)}"


@each(BITS)
def test_trains_and_resumes_to_the_bit(
    name: str, stage: int, ranks: int, before: Path, tmp_path: Path
) -> None:
    row = Row(name, stage, ranks)
    expected, told = recorded(before, row)
    for rank, (one, other) in enumerate(zip(expected, train(row, tmp_path / "all"), strict=True)):
        assert not first_difference(one, other), f"rank {rank}, {told}"
    for rank, other in enumerate(train(row, tmp_path / "rest", before)):
        one = dict(expected[rank], saved=expected[rank]["saved"][1:])
        one["losses"] = one["losses"][len(one["losses"]) * MIDDLE // STEPS :]
        assert not first_difference(one, other), f"resumed, rank {rank}, {told}"


@each(RETIRED)
def test_goes_on_with_checkpoints_of_a_retired_mode(
    name: str, stage: int, ranks: int, before: Path, tmp_path: Path
) -> None:
    row = Row(name, stage, ranks)
    expected, told = recorded(before, row)
    for rank, found in enumerate(train(row, tmp_path, before)):
        losses = [float.fromhex(loss) for loss in expected[rank]["losses"]]
        now = [float.fromhex(loss) for loss in found["losses"]]
        apart = [abs(a - b) for a, b in zip(losses[-len(now) :], now, strict=True)]
        assert max(apart) < ALIKE * losses[0], f"rank {rank}: {now}, were {losses}; {told}"


def test_every_variant_has_its_rows(before: Path) -> None:
    """So a variant that comes later is written, too."""
    rows = json.loads((before / TABLE).read_text())["rows"]
    assert list(rows) == [str(row) for row in ROWS]
    assert {row.name for row in ROWS} == set(VARIANTS)
    for row in ROWS:
        assert (before / str(row) / str(MIDDLE)).is_dir()
        losses = [float.fromhex(loss) for loss in rows[str(row)][0]["losses"]]
        assert losses[-1] < losses[0]
        assert (rows[str(row)][0]["skipped"] > 0) == ("skipped" in row.name)
