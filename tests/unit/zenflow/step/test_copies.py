"""Copies of tensor-parallel ranks that share a block with a parameter that is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.runtime import log as _logging
from tests.support.log import heard
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import Grid, TensorParallelBlock
from tests.support.zenflow import make_engine, zenflow_config


def told(config: dict[str, Any], width: int) -> list[str]:
    mpu = Grid(2)
    _logging._logged.clear()  # of earlier tests in this process
    with heard("share a block of zenflow.block_size") as log:
        engine = make_engine(config, model=lambda: TensorParallelBlock(mpu, width), mpu=mpu)
    engine.destroy()
    return [text for _, text in log]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_start_names_the_block_size_that_keeps_them_apart(stage: int) -> None:
    config = zenflow_config(stage, torch.bfloat16)
    config["zero_optimization"].pop("sub_group_size", None)
    for log in run_ranks(2, told, config, 40, pool="tensor parallel"):
        assert ["zenflow.block_size = 8" in text for text in log] == [True]
    assert run_ranks(2, told, config, 64, pool="tensor parallel") == [[], []]
    config["zero_optimization"]["zenflow"]["block_size"] = 8
    assert run_ranks(2, told, config, 40, pool="tensor parallel") == [[], []]
