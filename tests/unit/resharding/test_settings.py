"""Settings of DeepSpeed that change how it loads a checkpoint, in runs of another layout and of ZenFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.resharded import STEPS, Run, resume, saved_by


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize(
    ("saved", "resumed", "steps"),
    [
        (Run(2, 3, "zero"), Run(2, 2, "zero", "load_from_fp32_weights"), STEPS),
        (Run(2, 2, "predictive"), Run(2, 2, "predictive", "load_from_fp32_weights"), STEPS + 1),
    ],
    ids=["stage 3 to 2", "ZenFlow within an interval"],
)
def test_masters_come_from_the_checkpoint_if_weights_cannot_give_them(
    saved: Run, resumed: Run, steps: int, module_folder: Path
) -> None:
    """With ``load_from_fp32_weights = false`` DeepSpeed sets p to the weights. After another stage's checkpoint these
    are not loaded yet, and ZenFlow's are predictions."""
    folder, _ = saved_by(saved, module_folder, steps)
    goes_on = saved.stage == resumed.stage
    for difference, _ in run_ranks(2, resume, resumed, folder, steps, pool=resumed.pool, goes_on=goes_on):
        assert difference == ""


def test_ranks_that_load_one_after_the_other_load_another_layout_together(module_folder: Path) -> None:
    """With ``pipeline_loading_checkpoint`` a rank waits for the one before it, which would wait in our collectives."""
    resumed = Run(2, 3, "zero", "pipeline_loading_checkpoint")
    folder, _ = saved_by(Run(3, 2, "zero"), module_folder)
    for difference, _ in run_ranks(2, resume, resumed, folder, pool=resumed.pool, timeout_seconds=60):
        assert difference == ""
