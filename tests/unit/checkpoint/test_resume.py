"""Saving changes nothing, and a run resumed in another process continues to the bit, at every step
and phase."""

from pathlib import Path

import pytest

from tests.support.resuming import failed_resumes
from tests.support.zenflow import zenflow_config

WARM_UP = 3


BY_DEFAULT = {(3, 2)}
MATRIX = [(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2)]


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [pytest.param(*row, marks=() if row in BY_DEFAULT else pytest.mark.full) for row in MATRIX],
)
def test_resume_in_a_new_process(stage: int, ranks: int, tmp_path: Path) -> None:
    """From the end of the warm-up on."""
    config = zenflow_config(stage, full_warm_up_rounds=WARM_UP)
    assert failed_resumes(ranks, config, WARM_UP - 1, WARM_UP + 2, str(tmp_path)) == []


OVERLAPPED = {"update_interval": 3, "select_interval": 6, "overlap_step": True}
SEQUENTIAL = {"update_interval": 2, "select_interval": 4}


@pytest.mark.parametrize(
    ("stage", "ranks", "zenflow", "first"),
    [
        (2, 2, OVERLAPPED, 7),
        pytest.param(2, 2, OVERLAPPED, 2, marks=pytest.mark.full),
        pytest.param(3, 1, OVERLAPPED, 2, marks=pytest.mark.full),
        pytest.param(3, 2, SEQUENTIAL, 2, marks=pytest.mark.full),
    ],
)
def test_selective_resume_in_a_new_process(
    stage: int, ranks: int, zenflow: dict, first: int, tmp_path: Path
) -> None:
    """From every step of two intervals and over a selection: steps 2 (end of the warm-up, first
    selection) to 9; with intervals of 3 selections are at 2 and 8. By default from the last."""
    config = zenflow_config(stage, topk_ratio=0.1, full_warm_up_rounds=2, **zenflow)
    assert failed_resumes(ranks, config, first, 9, str(tmp_path)) == []
