"""Plain ZeRO writes a second checkpoint of a tag into the folder of the first, whose other files
stay there."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from deepspeed_ext.adapter.saved_checkpoint import SavedCheckpoint
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


def test_optimizer_files_of_two_dtypes_are_refused_where_it_matters(tmp_path: Path) -> None:
    """Their names differ, so both saves of a rank are there. DeepSpeed reads the one of its own
    dtype, though the model's file is that of the newer save."""
    first, second, other = Run(2, 2, "zero"), Run(2, 2, "zero", "fp32"), Run(3, 2, "zero", "fp32")
    saved_one_after_the_other(first, second, tmp_path)
    for difference, _ in run_ranks(2, resume, second, str(tmp_path), LATER, pool=second.pool):
        assert difference == ""
    for run, advice in (
        (first, "resume with the dtype of the newer save"),
        (other, "move the files of the older"),
    ):
        for message in run_ranks(run.ranks, refusal, run, str(tmp_path), pool=run.pool):
            assert (
                "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt and zero_pp_rank_0_mp_rank_00"
                in message
            )
            assert advice in message


@pytest.mark.parametrize(
    ("bf16_time", "fp32_time", "bf16_is_right", "fp32_is_right"),
    [(1, 2, False, True), (2, 1, True, False), (1, 1, False, False)],
    ids=["fp32 is newer", "bf16 is newer", "it cannot be told"],
)
def test_only_files_of_the_newer_dtype_are_left_to_deepspeed(
    bf16_time: int, fp32_time: int, bf16_is_right: bool, fp32_is_right: bool, tmp_path: Path
) -> None:
    for prefix, time in (("bf16_", bf16_time), ("", fp32_time)):
        file = tmp_path / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
        file.touch()
        os.utime(file, (time, time))
    for bf16, is_right in ((True, bf16_is_right), (False, fp32_is_right)):
        with (
            nullcontext() if is_right else pytest.raises(CheckpointError, match="of several saves")
        ):
            SavedCheckpoint(str(tmp_path)).require_newer(bf16)
