"""Upstream's own checkpoint tools read what our optimizers save."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.support.compare import base_config
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, train


def save_body(folder: str, stage: int, tier: str) -> dict[str, torch.Tensor]:
    """Train and save; the fp32 value of every trained parameter, gathered from the partitions."""
    config = base_config(stage, torch.bfloat16)
    config["zero_optimization"]["flatten_tier"] = tier
    engine = make_engine(config, model=partial(OddModel, awkward=True), groups=two_groups)
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    named = engine.module.named_parameters()
    trained = {name: param for name, param in named if param.requires_grad and param.numel()}
    return {name: safe_get_full_fp32_param(each).cpu().clone() for name, each in trained.items()}


@pytest.mark.parametrize(("stage", "tier"), [(1, "host"), (2, "distributed")])
def test_zero_to_fp32_reads_our_masters(tmp_path: Path, stage: int, tier: str) -> None:
    expected = run_ranks(2, save_body, str(tmp_path), stage, tier)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    assert_same(expected, {name: found[name] for name in expected}, "masters")
