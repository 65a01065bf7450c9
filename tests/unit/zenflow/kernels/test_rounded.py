"""The exact step of blocks whose moments have 16 or 8 bits, beside the worker's."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel import AdamStep, adam_pass
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.definition import loaded, step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.passes import HOST_CHUNK_NUMEL
from tests.support.meter import LiveBytes
from tests.support.same import assert_same

KEEPS = AdamStep(0.0, 0.0, 0.0, 1.0, 0.0, decoupled=True, step=7, grad_scale=1.0)
"""m becomes the gradient, and v its square."""
TRAINS = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled=True, step=1, grad_scale=0.5)
STORED = {"bfloat16": (torch.bfloat16,) * 2, "int8": (torch.int8, torch.uint8)}
BLOCK, ROWS = 32, 40
N = BLOCK * ROWS

of_both = pytest.mark.parametrize("dtype", STORED)


def wide(seed: int) -> torch.Tensor:
    """Gradients over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator) * 10 ** (6 * torch.rand(N, generator=generator) - 3)


def state_of(dtype: str, rows: int = ROWS) -> list[torch.Tensor]:
    p = torch.randn(rows, BLOCK, generator=torch.Generator().manual_seed(1))
    moments = [torch.zeros(rows, BLOCK, dtype=each) for each in STORED[dtype]]
    scales = [torch.zeros(rows, dtype=torch.uint8) for _ in range(2 if dtype == "int8" else 0)]
    return [p, *moments, *scales]


def here_and_there(
    dtype: str, steps: list[AdamStep], grads: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """p, m and v in fp32 as stepped beside the worker, and by the worker's definition."""
    state = state_of(dtype)
    p, m, v = state[0].view(-1).clone(), torch.zeros(N), torch.zeros(N)
    weights = torch.empty(ROWS, BLOCK, dtype=torch.bfloat16)
    for step, grad in zip(steps, grads, strict=True):
        launch.adam_step(state, grad.view(ROWS, BLOCK), weights, step)
        layout = replace(ADAM_STATE, moment_dtype=dtype)
        step_in_fp32(layout, [p, m, v], grad, step, BLOCK, 0)
    assert torch.equal(weights.nan_to_num(), state[0].bfloat16().nan_to_num())
    here = loaded([each.view(-1) for each in state[1:3]], state[3:], BLOCK)
    return [state[0].view(-1), *here], [p, m, v]


@of_both
def test_moments_are_rounded_as_by_the_worker(dtype: str) -> None:
    """To the bit, also where they are zero, subnormal, too large or no number."""
    grad = wide(3)
    grad[3], grad[40], grad[77], grad[200] = 0.0, 1e-40, math.nan, 3e38
    for number in (7, 2**31 - 1):
        here, there = here_and_there(dtype, [replace(KEEPS, step=number)], [grad])
        assert_same(*([each.nan_to_num() for each in found[1:]] for found in (there, here)))


@of_both
def test_chunks_do_not_matter(dtype: str) -> None:
    found = []
    for numel in (1 << 22, 5 * BLOCK):
        with patch.object(adam_pass, "ROUNDED_CHUNK_NUMEL", numel):
            state, weights = state_of(dtype), torch.empty(ROWS, BLOCK)
            for t in (1, 2):
                step = replace(TRAINS, step=t)
                launch.adam_step(state, wide(t).view(ROWS, BLOCK), weights, step)
        found.append([*state, weights])
    assert_same(*found)


@of_both
def test_torch_operations_take_the_memory_that_the_plan_says(dtype: str) -> None:
    rows = HOST_CHUNK_NUMEL // BLOCK
    state, grad = state_of(dtype, rows), torch.ones(rows, BLOCK)
    weights = torch.empty(rows, BLOCK)
    planned = replace(ADAM_STATE, moment_dtype=dtype).step_bytes(rows * BLOCK, BLOCK)
    meter = LiveBytes()
    meter.watch(*state, grad, weights)
    held = sum(meter.live.values())
    with meter:
        launch.adam_step(state, grad, weights, TRAINS)
    assert 0.95 * planned < meter.peak["total"] - held <= planned
