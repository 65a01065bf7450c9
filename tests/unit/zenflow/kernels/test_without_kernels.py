"""Where no kernel runs: torch operations, whose temporaries are those of one chunk, and one line in
the log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.runtime.log import logger
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel import definition
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from tests.support.ranks import on_sim, run_ranks
from tests.support.zenflow import RULES, make_engine, zenflow_config

BLOCK = 32
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 3, 1.0)
MIB = 1 << 20


def calls(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Each part of a step on bf16 arrays of `numel` elements, whole blocks."""
    weights, published, grad = (
        torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    inverse = torch.ones(numel // BLOCK, device=device)
    p, m, v = torch.ones(3, numel // BLOCK, BLOCK, device=device).unbind()
    rows, of_share = grad.view(-1, BLOCK), weights.view(-1, BLOCK)
    return {
        "predict": lambda: launch.predict(weights, published, grad, inverse, 0.5, 1e-3, BLOCK),
        "share step": lambda: launch.adam_step([p, m, v], rows, of_share, STEP),
    }


ARRAYS = {"predict": 3, "share step": 2}
"""Temporaries in fp32, in chunks."""


def peaks(numel: int, chunk: int) -> dict[str, int]:
    """Bytes of the temporaries of each part of a step on the simulated accelerator."""
    from tests.support.simulated_accelerator import device as sim

    found = {}
    with patch.object(definition, "ACCELERATOR_CHUNK_NUMEL", chunk):
        for name, call in calls(numel, torch.device("sim")).items():
            sim.synchronize()
            sim.reset_peak_memory_stats()
            before = sim.memory_allocated()
            call()
            sim.synchronize()
            found[name] = sim.max_memory_allocated() - before
    return found


def test_temporaries_on_a_device_without_kernels_are_those_of_one_chunk() -> None:
    """A few arrays in fp32, of which two are for dithering, and a few numbers for each block; the
    partition has 16 chunks."""
    chunk, numbers = 1 << 16, 6 * 4 * (1 << 16) // BLOCK
    (found,) = on_sim(peaks, 16 * chunk, chunk)
    assert set(found) == ARRAYS.keys()
    for name, nbytes in found.items():
        least = 4 * ARRAYS[name] * chunk
        assert least <= nbytes <= least + numbers, name


class Allocations(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ARRAYS)
def test_temporaries_on_the_cpu_are_those_of_one_chunk(name: str) -> None:
    chunk = definition.chunk_numel(torch.device("cpu"), BLOCK)
    call = calls(8 * chunk, torch.device("cpu"))[name]
    with patch.object(launch, "_library", lambda: None), Allocations() as allocations:
        call()
    assert 4 * chunk <= allocations.largest <= 4 * ARRAYS[name] * chunk <= MIB


def told_at_the_start(config: dict[str, Any]) -> list[str]:
    told: list[str] = []
    with patch.object(launch, "warn_once", told.append), patch.object(logger, "warning") as warning:
        launch.prepare(torch.device("cpu"), BLOCK, [], warns=True)  # where nobody expects kernels
        make_engine(config).destroy()
    return told + [call.args[0] for call in warning.call_args_list]


def test_rank_0_says_that_there_are_no_kernels_and_what_the_rule_lacks() -> None:
    config = zenflow_config(2, **RULES["selective"] | {"select_strategy": "epoch"})
    (kernels, rule), others = run_ranks(2, told_at_the_start, config, device="sim")
    assert kernels.startswith("ZenFlow computes in torch operations on sim:0, a chunk")
    assert "training_data" in rule
    assert others == []


def test_without_triton_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    reason = launch._found.__wrapped__("xpu")
    assert isinstance(reason, str)
    assert "Triton cannot be imported" in reason
    assert "pip install triton" in reason
