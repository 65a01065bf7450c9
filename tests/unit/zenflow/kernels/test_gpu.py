"""The kernels beside their definition: on an accelerator, and in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from tests.support.ranks import run_ranks
from tests.support.same import assert_same

CODES = (torch.int8, torch.uint8)
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 9, 0.5)


def both_ways(numel: int, first: int) -> list[list[torch.Tensor]]:
    """Results of each kernel on arrays at an offset, with kernels if there are any, and as torch
    operations."""
    device, found = torch.device(get_accelerator().current_device_name()), []
    for kernels in (True, False):
        torch.manual_seed(0)
        w, y, g = (torch.randn(numel + first).bfloat16().to(device)[first:] for _ in range(3))
        inverse = torch.rand(-(-numel // 32)).to(device)
        p, m, v = torch.rand(3, numel // 32, 32).to(device)
        with patch.object(launch, "serves", launch.serves if kernels else lambda *_: False):
            launch.predict(w, y, g, inverse, 0.7, 2e-3, 32)
            rows = g[: numel // 32 * 32].view(-1, 32)
            share = [p.clone(), m.clone(), v.clone()]
            of_share = y[: rows.numel()].view(-1, 32)
            launch.adam_step(share, rows, of_share, STEP)
            coded = [p.clone(), *(torch.zeros_like(rows, dtype=each) for each in CODES)]
            coded += [torch.zeros(len(p), dtype=torch.uint8, device=device) for _ in CODES]
            of_16_bits = [p.clone(), m.bfloat16(), v.bfloat16()]
            for state in (coded, of_16_bits):
                for number in (1, 2):
                    launch.adam_step(state, rows, of_share, replace(STEP, step=number))
        results = (w, *share, of_share, *coded, *of_16_bits)
        found.append([array.cpu() for array in results])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_kernels_on_an_accelerator_equal_torch_operations_to_the_bit(first: int) -> None:
    kernels, operations = run_ranks(1, both_ways, (1 << 18) + 45, first, device="accelerator")[0]
    names = "predicted weights, states and weights"
    assert_same(kernels, operations, names)


@pytest.mark.parametrize("cases", [7, pytest.param(600, marks=pytest.mark.full)])
def test_kernels_equal_their_definition_to_the_bit(cases: int) -> None:
    """Invented lengths, blocks, offsets, dtypes and numbers, some not finite, negative zero or
    subnormal."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.interpreted_kernels",
        str(cases),
        "7",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{cases} cases"), done.stdout
