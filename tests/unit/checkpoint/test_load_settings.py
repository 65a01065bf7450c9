"""Settings of DeepSpeed that change how it loads a checkpoint, in runs of another layout and of
ZenFlow."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.runtime import log
from tests.support.models import OddModel, two_groups
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.resharded import STEPS, Model, Run, data, resume, saved_by, state_of
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import make_engine, train


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("saved", "resumed", "steps"),
    [
        (Run(2, 3, "zero"), Run(2, 2, "zero", "load_from_fp32_weights"), STEPS),
        (Run(2, 2, "predictive"), Run(2, 2, "predictive", "load_from_fp32_weights"), STEPS + 1),
        (Run(2, 2, "selective"), Run(2, 2, "selective", "fp32_sums"), STEPS + 1),
    ],
    ids=["stage 3 to 2", "ZenFlow", "a mean of another dtype"],
)
def test_masters_come_from_the_checkpoint_if_weights_cannot_give_them(
    saved: Run, resumed: Run, steps: int, module_folder: Path
) -> None:
    """With ``load_from_fp32_weights = false`` DeepSpeed sets p to the weights. After another
    stage's checkpoint these are not loaded yet, and ZenFlow's are predictions."""
    folder, _ = saved_by(saved, module_folder, steps)
    goes_on = saved.stage == resumed.stage
    for difference, _ in run_ranks(
        2, resume, resumed, folder, steps, pool=resumed.pool, goes_on=goes_on
    ):
        assert difference == ""


def load_and_listen(run: Run, folder: str) -> tuple[dict[str, Any], list[str]]:
    """p by name of the parameter, and what the load logs about ``load_from_fp32_weights``."""
    log._logged.clear()  # of earlier tests in this process
    heard = Mock(level=logging.NOTSET)
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    log.logger.addHandler(heard)
    try:
        engine.load_checkpoint(folder, tag="t")
    finally:
        log.logger.removeHandler(heard)
    masters = {name: values[0] for name, values in state_of(engine).items() if name != "step"}
    engine.destroy()
    texts = [call.args[0].getMessage() for call in heard.handle.call_args_list]
    return masters, [text for text in texts if "load_from_fp32_weights" in text]


def test_with_zenflow_masters_come_from_edited_weights_of_plain_zero(
    module_folder: Path, tmp_path: Path
) -> None:
    """Only weights that ZenFlow saved are predictions."""
    folder, _ = saved_by(Run(2, 2, "zero"), module_folder)
    shutil.copytree(Path(folder, "t"), tmp_path / "t")
    file = tmp_path / "t" / "mp_rank_00_model_states.pt"
    content = torch.load(file, map_location="cpu", weights_only=False)
    edited = {name: value * 2 for name, value in content["module"].items()}
    torch.save({**content, "module": edited}, file)
    run = Run(2, 2, "predictive", "load_from_fp32_weights")
    for masters, said in run_ranks(2, load_and_listen, run, str(tmp_path), pool=run.pool):
        assert_same({name: edited[name].float() for name in masters}, masters, "masters")
        assert said == []


@pytest.mark.parametrize(("stage", "is_said"), [(2, True), (3, False)])
def test_it_is_said_where_deepspeed_would_read_the_setting(
    stage: int, is_said: bool, module_folder: Path
) -> None:
    folder, _ = saved_by(Run(2, stage, "predictive"), module_folder, STEPS + 1)
    run = Run(2, stage, "predictive", "load_from_fp32_weights")
    (_, said), (_, said_elsewhere) = run_ranks(2, load_and_listen, run, folder, pool=run.pool)
    assert ["ZenFlow's weights are predictions" in text for text in said] == [True] * is_said
    assert said_elsewhere == []


def test_ranks_that_load_one_after_the_other_load_another_layout_together(
    module_folder: Path,
) -> None:
    """With ``pipeline_loading_checkpoint`` a rank waits for the one before it, which would wait in
    our collectives."""
    resumed = Run(2, 3, "zero", "pipeline_loading_checkpoint")
    folder, _ = saved_by(Run(3, 2, "zero"), module_folder)
    for difference, _ in run_ranks(
        2, resume, resumed, folder, pool=resumed.pool, timeout_seconds=60
    ):
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
    """How p, m and v differ that a compiled model has loaded from the checkpoint of one that was
    not."""
    engine = make_engine(run.config, extended=extended, groups=two_groups)
    train(engine, data(0, STEPS))
    engine.save_checkpoint(folder, tag="t")
    expected = state_of(engine)
    engine.destroy()
    engine = make_engine(run.config, extended=extended, model=Compiled, groups=two_groups)
    how: dict[str, Any] = (
        {"load_module_strict": False} if run.stage == 3 else {"custom_load_fn": load_uncompiled}
    )
    engine.load_checkpoint(folder, tag="t", **how)
    found = {name.removeprefix("_orig_mod."): value for name, value in state_of(engine).items()}
    engine.destroy()
    return first_difference(expected, found, "arrived")


@pytest.mark.parametrize(
    ("run", "extended"),
    [(Run(2, 2, "zero"), False), (Run(2, 2, "zero"), True), (Run(2, 3, "predictive"), True)],
    ids=["DeepSpeed", "stage 2", "stage 3 with ZenFlow"],
)
def test_renamed_parameters_of_the_same_layout_are_loaded_by_position(
    run: Run, extended: bool, tmp_path: Path
) -> None:
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

    get_data_parallel_rank = get_model_parallel_rank
    get_data_parallel_world_size = get_model_parallel_world_size


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
