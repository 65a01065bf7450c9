"""Plain ZeRO writes a second checkpoint of a tag into the folder of the first, whose other files
stay there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deepspeed_ext.errors import CheckpointError
from tests.support.models import two_groups
from tests.support.ranks import run_ranks
from tests.support.resharded import STEPS, Model, Run, resume, save
from tests.support.zenflow import make_engine

LATER = STEPS + 2


def saved_one_after_the_other(first: Run, second: Run, folder: Path) -> None:
    for run, steps in ((first, STEPS), (second, LATER)):
        run_ranks(run.ranks, save, run, str(folder), steps, pool=run.pool)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second", "resumed"),
    [
        (Run(2, 3, "zero"), Run(2, 2, "zero"), Run(2, 2, "zero")),
        (Run(2, 3, "zero"), Run(2, 2, "zero"), Run(3, 3, "zero")),
        (Run(4, 2, "zero"), Run(2, 2, "zero"), Run(1, 2, "zero")),
    ],
    ids=["the same layout", "another stage", "fewer ranks"],
)
def test_the_newer_save_is_loaded(first: Run, second: Run, resumed: Run, tmp_path: Path) -> None:
    saved_one_after_the_other(first, second, tmp_path)
    for difference, _ in run_ranks(
        resumed.ranks, resume, resumed, str(tmp_path), LATER, pool=resumed.pool
    ):
        assert difference == ""


def refusal(run: Run, folder: str) -> str:
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    try:
        with pytest.raises(CheckpointError) as refused:
            engine.load_checkpoint(folder, tag="t")
    finally:
        engine.destroy()
    return str(refused.value)


def test_optimizer_files_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    """Their names differ, so both saves of a rank are there, and one model's file."""
    first, second = Run(2, 2, "zero"), Run(2, 2, "zero", "fp32")
    saved_one_after_the_other(first, second, tmp_path)
    for message in run_ranks(2, refusal, second, str(tmp_path), pool=second.pool):
        assert "bf16_zero_pp_rank_" in message
        assert "move those of the older save elsewhere" in message
