"""States of earlier releases are read as this one's."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from deepspeed_ext.checkpoint.zenflow_state import read_saved_state
from deepspeed_ext.zenflow.rules.selective import SelectivePartitionValues, SelectiveState
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from tests.support.same import assert_same

BLOCK, NUMEL = 8, 3 * 8 + 5
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 10, 0.5)


def saved(collected: int) -> dict[str, Any]:
    """What 0.2.0.dev saved of a partition of four blocks, of which the second and the short last
    are hot."""
    gradients = [torch.full((NUMEL,), float(k + 1)) for k in range(collected)]
    scales = (0.5, 0.25)
    steps = [replace(STEP, step=10 + k, grad_scale=scales[k]) for k in range(collected)]
    return {
        "version": 9,
        "rule": "selective",
        "kernel": "native",
        "block_size": BLOCK,
        "schedule": {"steps": 11, "interval": 4, "steps_in_flight": None, "since_selection": 3},
        "updates": 11,
        "partitions": [
            {
                "numel": NUMEL,
                "on_accelerator": 0,
                "collected": [asdict(step) for step in steps],
                "gradients": gradients,
                "block_updates": torch.tensor([4, 11, 6, 11], dtype=torch.int32),
                "hot_blocks": torch.tensor([1, 3]),
            }
        ],
    }


@pytest.mark.parametrize("collected", [0, 2])
def test_block_counts_become_one_and_collected_gradients_their_mean(collected: int) -> None:
    state = read_saved_state(saved(collected), [NUMEL])
    (values,) = state.partitions
    assert isinstance(values, SelectivePartitionValues)
    assert (values.cold_updates, state.counts) == (4, [11])
    assert values.hot_blocks is not None
    assert values.hot_blocks.tolist() == [1]
    assert isinstance(state.schedule, SelectiveState)
    assert state.schedule.collected == collected
    assert "earlier" in state.kernel
    if collected:
        assert values.last is not None
        assert values.mean is not None
        # (0.5 * 1 + 0.25 * 2) / 2, in units of the last factor, 0.25
        assert_same(torch.full((NUMEL,), 2.0), values.mean, "mean")
        p, m, v = torch.ones(3, NUMEL)
        values.catch_up((p, m, v), BLOCK)
        assert (p[:8] != 1.0).all()
        assert (p[8:16] == 1.0).all(), "the hot block has had its gradients"
    else:
        assert values.last is values.mean is None
