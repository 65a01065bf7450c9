"""Which copies of tensor-parallel ranks share a block with a parameter that is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.runtime import log as _logging
from deepspeed_ext.zenflow.start import Piece, largest_block_apart, mixed
from tests.support.log import heard
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import Grid, TensorParallelBlock
from tests.support.zenflow import make_engine, zenflow_config


@given(
    st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([1, 2, 8, 32, 48]),
)
def test_mixed_are_the_copies_with_an_element_in_a_block_of_both_kinds(
    sizes: list[tuple[int, bool]], block: int
) -> None:
    runs, end = [], 0
    for index, (numel, is_copy) in enumerate(sizes):
        runs.append(Piece(end, end + numel, is_copy, str(index)))
        end += numel
    kinds: dict[int, set[bool]] = {}
    for run in runs:
        for element in range(run.begin, run.end):
            kinds.setdefault(element // block, set()).add(run.is_copy)
    both = {number for number, found in kinds.items() if len(found) == 2}
    expected = [
        r.name for r in runs if r.is_copy and {i // block for i in range(r.begin, r.end)} & both
    ]
    assert mixed(runs, block) == expected
    chosen = largest_block_apart([runs], block)
    assert mixed(runs, chosen) == []
    assert chosen == 1 or chosen & (chosen - 1) == 0
    assert 2 * chosen > block or mixed(runs, 2 * chosen) or chosen == 1


def told(config: dict[str, Any], width: int) -> list[str]:
    mpu = Grid(2)
    _logging._logged.clear()  # of earlier tests in this process
    with heard("share a block of zenflow.block_size") as log:
        engine = make_engine(config, model=lambda: TensorParallelBlock(mpu, width), mpu=mpu)
    engine.destroy()
    return [text for _, text in log]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_start_names_them_and_the_block_size_that_helps(stage: int) -> None:
    config = zenflow_config(stage, torch.bfloat16)
    config["zero_optimization"].pop("sub_group_size", None)
    for log in run_ranks(2, told, config, 40, pool="tensor parallel"):
        assert len(log) == 1
        assert "zenflow.block_size = 8" in log[0]
    assert run_ranks(2, told, config, 64, pool="tensor parallel") == [[], []]
    config["zero_optimization"]["zenflow"]["block_size"] = 8
    assert run_ranks(2, told, config, 40, pool="tensor parallel") == [[], []]
