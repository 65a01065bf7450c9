"""A graph can be captured while copies are under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tests.support.models import batches
from tests.support.ranks import is_simulated, run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def train_and_capture(
    config: dict[str, Any], steps: int, captures: bool
) -> tuple[list[float], bool]:
    """Losses, and whether each graph that was captured beside the copies of a step computes what it
    should."""
    accelerator = get_accelerator()
    module: Any = torch.get_device_module(accelerator.device_name())
    device, losses, right = accelerator.current_device_name(), list[float](), True
    engine = make_engine(config)
    source, stream = torch.ones(1 << 20, device=device), accelerator.Stream()
    for batch in batches(steps, dist.get_rank()):
        losses += train(engine, [batch])
        if captures:
            graph = module.CUDAGraph()
            with module.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = source * 2
            graph.replay()
            right = right and bool((result == 2).all())
    engine.destroy()
    return losses, right


@pytest.mark.gpu
def test_a_graph_is_captured_beside_the_copies_of_a_step() -> None:
    if is_simulated():
        pytest.skip("the simulated accelerator has no graphs")
    config = zenflow_config(2, hide_transfers=True)
    (plain, _), (captured, right) = (
        run_ranks(1, train_and_capture, config, 20, captures, device="accelerator")[0]
        for captures in (False, True)
    )
    assert captured == plain
    assert right
