"""Lion in DeepSpeed: without overlap ZeRO-Offload's to the bit; no optimizer loads
another's state. What all ways to train have in common is in test_variants.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import safe_get_full_optimizer_state

from deepspeed_ext.errors import CheckpointError
from tests.support.experts import ExpertModel, expert_groups
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import (
    make_engine,
    offload_config,
    run,
    train,
    weights_of,
    zenflow_config,
)
from tests.support.zenflow_runs import with_and_without

pytestmark = pytest.mark.sampled()


def lion_config(
    stage: int,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: int = 1,
    lr: float = 1e-4,
    **zenflow: Any,
) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, accumulation, **zenflow)
    config["optimizer"] = {
        "type": "Lion",
        "params": {"lr": lr, "betas": [0.9, 0.99], "weight_decay": 0.1},
    }
    return config


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_overlap_it_equals_zero_offload_to_the_bit(
    stage: int, dtype: torch.dtype, accumulation: int, has_experts: bool
) -> None:
    """On a CPU with fused multiply-adds, as every one that DeepSpeed's operator has vectors for."""
    if has_experts and stage == 3:
        pytest.skip("DeepSpeed has no experts there")
    config = lion_config(stage, dtype, accumulation, overlap_step=False)
    if accumulation > 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["gradient_clipping"] = 0.05
    how = {"model": partial(ExpertModel, 2, 4), "groups": expert_groups} if has_experts else {}
    for expected, actual in run_ranks(2, with_and_without, config, 12, **how):
        assert_same((expected.losses, expected.weights), (actual.losses, actual.weights))


def with_own_optimizer(config: dict[str, Any]) -> list[float]:
    """The losses of a run whose optimizer the user has built."""
    config = {key: value for key, value in config.items() if key != "optimizer"}
    engine = make_engine(
        config,
        optimizer=lambda p: DeepSpeedCPULion(p, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
    )
    losses = train(engine, batches(5, dist.get_rank()))
    engine.destroy()
    return losses


def losses_of(config: dict[str, Any], steps: int, **how: Any) -> list[float]:
    return run(config, steps, rank=dist.get_rank(), **how).losses


def test_an_optimizer_of_the_users_own_trains_the_same() -> None:
    config = lion_config(2)
    assert run_ranks(1, with_own_optimizer, config) == run_ranks(1, losses_of, config, 5)


# -- state -----------------------------------------------------------------------------------------


def second_moment(config: dict[str, Any]) -> str:
    """What reading a moment that Lion does not have raises."""
    engine = make_engine(config)
    train(engine, batches(2, dist.get_rank()))
    try:
        safe_get_full_optimizer_state(next(engine.module.parameters()), "exp_avg_sq")
    except (KeyError, ValueError) as error:
        return type(error).__name__
    finally:
        engine.destroy()
    return "read"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_moment_is_an_error(stage: int) -> None:
    assert run_ranks(1, second_moment, lion_config(stage))[0] in ("KeyError", "ValueError")


def crossed(
    saves: dict[str, Any], loads: dict[str, Any], folder: str, extended: bool = True
) -> str:
    engine = make_engine(saves, extended=extended)
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = make_engine(loads)
    try:
        before = weights_of(engine)
        engine.load_checkpoint(folder, tag="t")
    except CheckpointError as error:
        assert not first_difference(before, weights_of(engine)), "a part was loaded"
        return str(error)
    finally:
        engine.destroy()
    return "loaded"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_neither_loads_what_the_other_saved(stage: int, extended: bool, tmp_path: Path) -> None:
    """With ZenFlow, or with ZeRO-Offload of DeepSpeed."""
    lion, adam = lion_config(stage), zenflow_config(stage)
    for number, (saves, loads) in enumerate([(lion, adam), (adam, lion), (lion, lion)]):
        saves = saves if extended else offload_config(saves)
        told = run_ranks(2, crossed, saves, loads, str(tmp_path / str(number)), extended)
        expected = "loaded" if number == 2 else "the checkpoint is of another optimizer"
        assert all(expected in each for each in told), told
