"""Upstream's own checkpoint tools read what our optimizers save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import deepspeed_ext
from tests.support.compare import base_config
from tests.support.models import OddModel, batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import assert_same


def build(stage: int, tier: str | None, universal: bool = False) -> Any:
    config = base_config(stage, torch.bfloat16)
    config["zero_optimization"]["flatten_tier"] = tier
    config["checkpoint"] = {"load_universal": universal}
    torch.manual_seed(5)
    model = OddModel(awkward=True)
    return deepspeed_ext.initialize(model=model, model_parameters=two_groups(model), config=config)[
        0
    ]


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The fp32 value of every trained parameter, gathered from the ranks' partitions."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found[name] = safe_get_full_fp32_param(parameter).cpu().clone()
    return found


def step(engine: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in data:
        loss = engine(on_device(batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_body(folder: str, stage: int, tier: str) -> dict[str, torch.Tensor]:
    engine = build(stage, tier)
    step(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    return masters(engine)


@pytest.mark.parametrize(("stage", "tier"), [(1, "host"), (2, "distributed")])
def test_zero_to_fp32_reads_our_masters(tmp_path: Path, stage: int, tier: str) -> None:
    expected = run_ranks(2, save_body, str(tmp_path), stage, tier)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    assert_same(expected, {name: found[name] for name in expected}, "masters")
