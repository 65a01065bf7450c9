"""Settings of DeepSpeed that change how it loads a checkpoint, in runs of another layout and of ZenFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import OddModel, two_groups
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.resharded import STEPS, Run, data, resume, saved_by, state_of
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, train


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


class Compiled(torch.nn.Module):
    """Names its parameters as ``torch.compile`` does."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = OddModel()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(tokens)


def load_uncompiled(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    dst.load_state_dict({f"_orig_mod.{name}": value for name, value in src.items()})


def resume_compiled(run: Run, extended: bool, folder: str) -> str:
    """How p, m and v differ that a compiled model has loaded from the checkpoint of one that was not."""
    engine = make_engine(run.config, extended=extended, groups=two_groups)
    train(engine, data(0, STEPS))
    engine.save_checkpoint(folder, tag="t")
    expected = state_of(engine)
    engine.destroy()
    engine = make_engine(run.config, extended=extended, model=Compiled, groups=two_groups)
    how: dict[str, Any] = {"load_module_strict": False} if run.stage == 3 else {"custom_load_fn": load_uncompiled}
    engine.load_checkpoint(folder, tag="t", **how)
    found = {name.removeprefix("_orig_mod."): value for name, value in state_of(engine).items()}
    engine.destroy()
    return first_difference(expected, found, "arrived")


@pytest.mark.parametrize(
    ("run", "extended"),
    [(Run(2, 2, "zero"), False), (Run(2, 2, "zero"), True), (Run(2, 3, "predictive"), True)],
    ids=["DeepSpeed", "stage 2", "stage 3 with ZenFlow"],
)
def test_renamed_parameters_of_the_same_layout_are_loaded_by_position(run: Run, extended: bool, tmp_path: Path) -> None:
    assert run_ranks(2, resume_compiled, run, extended, str(tmp_path), pool=run.pool) == ["", ""]


class Alone:
    """An ``mpu`` that gives every rank an engine of its own."""

    def __init__(self) -> None:
        self._groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def _own(self) -> Any:
        return self._groups[dist.get_rank()]

    get_model_parallel_group = get_data_parallel_group = _own

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_data_parallel_rank, get_data_parallel_world_size = get_model_parallel_rank, get_model_parallel_world_size


def load_on_one_rank(config: dict[str, Any], folder: str) -> bool:
    engine = make_engine(config, groups=two_groups, mpu=Alone())
    engine.save_checkpoint(f"{folder}/{dist.get_rank()}", tag="t")
    path = engine.load_checkpoint(f"{folder}/0", tag="t")[0] if dist.get_rank() == 0 else ""
    dist.barrier()
    engine.destroy()
    return path is not None


def test_an_engine_of_some_ranks_loads_without_the_others(tmp_path: Path) -> None:
    config = Run(1, 2, "zero").config
    for outcome in run_fresh_ranks(2, load_on_one_rank, config, str(tmp_path), timeout_seconds=35):
        assert outcome.error is None
        assert outcome.value
