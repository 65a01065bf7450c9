"""Lightning's DeepSpeedStrategy with ZenFlow, as in the example: losses of plain ZeRO, and resuming
to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainers import OVERLAPPED, STEPS, WAITING, on_two_ranks

pytest.importorskip("lightning")
lightning_run = pytest.importorskip("tests.support.lightning_trainers").lightning_run

ACCUMULATED = 2
"""Micro-steps of a step."""


@pytest.mark.parametrize("stage", [2, 3])
def test_resumes_to_the_bit(stage: int, tmp_path: Path) -> None:
    whole = on_two_ranks(lightning_run, tmp_path / "whole", stage, OVERLAPPED)
    begun = on_two_ranks(lightning_run, tmp_path / "parts", stage, OVERLAPPED, epochs=1)
    resumed = on_two_ranks(lightning_run, tmp_path / "parts", stage, OVERLAPPED, resume=True)
    assert [[*first, *rest] for first, rest in zip(begun, resumed, strict=True)] == whole
    assert len(whole[0]) == ACCUMULATED * STEPS
    assert sum(whole[0][STEPS:]) < sum(whole[0][:STEPS])


@pytest.mark.parametrize("stage", [2, 3])
def test_without_overlap_it_equals_plain_zero(stage: int, tmp_path: Path) -> None:
    how = {"precision": "32-true"}
    expected = on_two_ranks(lightning_run, tmp_path / "zero", stage, None, **how)[0]
    found = on_two_ranks(lightning_run, tmp_path / "zenflow", stage, WAITING, **how)[0]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == ACCUMULATED * STEPS
