"""Settings drawn at random from what docs/drop_in.md says works: each run resumes to the bit, or is
refused by name."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import ConfigError
from tests.support.compare import allow_fp16
from tests.support.experts import ExpertModel, expert_groups
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.resuming import final_state
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, train, zenflow_config

SEEDS = 40
BY_DEFAULT = 4
SAVED, LAST = 2, 4
"""Optimizer steps: a checkpoint is written after the one, and training ends after the other."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "adam_w_mode": False},
    "Lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
}


def drawn(seed: int) -> tuple[dict[str, Any], bool]:
    """A config, and whether the model has experts."""
    pick = random.Random(seed).choice
    stage, accumulation = pick([1, 2, 2, 3, 3]), pick([1, 1, 2])
    section: dict[str, Any] = {"full_warm_up_rounds": pick([0, 1, 1, 2])}
    section |= pick(
        [{}, {}, {}, {"overlap_step": False}, {"update_interval": 2}, {"topk_ratio": 0.2}]
    )
    section |= pick([{}, {}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}])
    section |= pick([{}, {}, {"gradients_on_host": True}, {"gradients_on_host": False}])
    section |= pick([{}, {}, {"async_save": True}, {"hide_transfers": False}])
    config = zenflow_config(stage, DTYPES[pick(list(DTYPES))], accumulation, **section)
    kind = pick(["AdamW", "Adam", "Lion"])
    config["optimizer"] = {"type": kind, "params": OPTIMIZERS[kind]}
    config["gradient_clipping"] = pick([0.0, 0.05, 1.0])
    if config["fp16"]["enabled"]:
        config["fp16"] |= pick(
            [{"initial_scale_power": 8}, {"loss_scale": 128}, {"initial_scale_power": 20}]
        )
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {"device": "cpu"} | pick([{}, {}, {"ratio": 0.5}, {"ratio": 0.0}])
    if stage == 3:
        zero |= pick([{}, {"offload_param": {"device": "cpu"}}])
    zero |= pick(
        [{}, {"overlap_comm": True}, {"contiguous_gradients": False}, {"reduce_bucket_size": 500}]
    )
    return config, pick([False, False, True]) and stage < 3


def engine_of(config: dict[str, Any], *, has_experts: bool) -> Any:
    allow_fp16()
    how = (
        {"model": partial(ExpertModel, 2, 4), "groups": expert_groups}
        if has_experts
        else {"groups": two_groups}
    )
    return make_engine(config, **how)


def data_of(config: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is trained on before the checkpoint, and after it."""
    every = config["gradient_accumulation_steps"]
    data = batches(LAST * every, dist.get_rank())
    return data[: SAVED * every], data[SAVED * every :]


def saved(config: dict[str, Any], has_experts: bool, folder: str) -> str:
    """Train, save in the middle, and write what comes out; or return why the config is refused."""
    try:
        engine = engine_of(config, has_experts=has_experts)
    except ConfigError as error:
        return str(error)
    before, after = data_of(config)
    train(engine, before)
    engine.save_checkpoint(folder, tag="t")
    losses = train(engine, after)
    torch.save((losses, final_state(engine)), Path(folder, f"expected-{dist.get_rank()}.pt"))
    engine.destroy()
    return ""


def resumed(config: dict[str, Any], has_experts: bool, folder: str) -> str:
    engine = engine_of(config, has_experts=has_experts)
    engine.load_checkpoint(folder, tag="t")
    losses = train(engine, data_of(config)[1])
    expected = torch.load(Path(folder, f"expected-{dist.get_rank()}.pt"), weights_only=False)
    difference = first_difference(expected, (losses, final_state(engine)), "losses, state")
    engine.destroy()
    return difference


@pytest.mark.parametrize(
    "seed",
    [
        seed if seed < BY_DEFAULT else pytest.param(seed, marks=pytest.mark.full)
        for seed in range(SEEDS)
    ],
)
def test_it_resumes_to_the_bit_or_is_refused_by_name(seed: int, tmp_path: Path) -> None:
    config, has_experts = drawn(seed)
    refused = run_ranks(2, saved, config, has_experts, str(tmp_path), pool="to save")
    if any(refused):
        assert len(set(refused)) == 1
        assert "zero_optimization.zenflow" in refused[0]
        assert ": " in refused[0]  # before the remedy
        return
    assert run_ranks(2, resumed, config, has_experts, str(tmp_path), pool="to resume") == ["", ""]
