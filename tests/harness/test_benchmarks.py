"""The benchmark of convergence keeps what it trained; upstream's ZenFlow is as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.perf import bench_convergence, sides
from tests.perf.bench_convergence import Results, changed_by_initialize, losses_table, trainings
from tests.support.ranks import run_ranks

STEPS = 6


@pytest.fixture(autouse=True)
def _own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))


@pytest.mark.full  # test_decoder.py trains by rows, test_bench_report.py keeps and reuses them
def test_convergence_trains_keeps_reuses_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainings(["AdamW", "predictive"], "tiny", STEPS, 1, (1e-3,))
    results = Results("convergence", reuse=True)
    for training in made:
        results.make(training)
    assert [row["key"]["side"]["name"] for row in results.rows] == ["AdamW", "predictive"]
    assert all(len(row["losses"]) == len(row["seconds"]) == STEPS for row in results.rows)
    adamw, ours = (row["losses"] for row in results.rows)
    # One synchronous step is AdamW's own, up to the rounding of another implementation.
    assert ours[:2] == pytest.approx(adamw[:2], abs=2e-3)

    again = Results("convergence", reuse=True)
    monkeypatch.setattr(bench_convergence, "run_ranks", None)  # nothing is trained twice
    for training in made:
        again.make(training)
    assert again.rows == results.rows
    assert [row["row"] for row in losses_table(again, made)] == ["AdamW", "predictive"]


def test_initialize_changes_no_weight() -> None:
    assert run_ranks(1, changed_by_initialize, sides.PREDICTIVE, 2) == [0]
    upstream = run_ranks(1, changed_by_initialize, sides.UPSTREAM_SEQUENTIAL, 2)
    assert upstream != [0], "upstream has been mended: say so in docs/design/upstream.md"
