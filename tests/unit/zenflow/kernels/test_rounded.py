"""The exact step of blocks on an accelerator without kernels: no bit depends on chunks, and it
takes the memory that the plan says. Its bits are those of the reference: one definition."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel import adam_pass, definition
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep
from deepspeed_ext.zenflow.worker.kernel.passes import HOST_CHUNK_NUMEL
from tests.support.kernels import wide
from tests.support.meter import LiveBytes
from tests.support.same import assert_same

TRAINS = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled=True, step=1, grad_scale=0.5)
STORED = {
    "float32": (torch.float32,) * 2,
    "bfloat16": (torch.bfloat16,) * 2,
    "int8": (torch.int8, torch.uint8),
}
BLOCK, ROWS = 32, 40


def state_of(dtype: str, rows: int = ROWS) -> list[torch.Tensor]:
    p = torch.randn(rows, BLOCK, generator=torch.Generator().manual_seed(1))
    moments = [torch.zeros(rows, BLOCK, dtype=each) for each in STORED[dtype]]
    scales = [torch.zeros(rows, dtype=torch.uint8) for _ in range(2 if dtype == "int8" else 0)]
    return [p, *moments, *scales]


@pytest.mark.parametrize("dtype", STORED)
def test_chunks_do_not_matter(dtype: str) -> None:
    found = []
    for numel in (1 << 22, 5 * BLOCK):
        with (
            patch.object(adam_pass, "ROUNDED_CHUNK_NUMEL", numel),
            patch.object(definition, "_CHUNK_NUMEL", {"cpu": numel}),
        ):
            state, weights = state_of(dtype), torch.empty(ROWS, BLOCK, dtype=torch.bfloat16)
            for t in (1, 2):
                grad = wide(ROWS * BLOCK, t).view(ROWS, BLOCK)
                launch.adam_step(state, grad, weights, replace(TRAINS, step=t))
            assert torch.equal(weights, state[0].bfloat16())
            found.append([*state, weights])
    assert_same(*found)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
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
