"""Streams of copies are none that others have taken from torch's pool, which gives each again, and
a graph can be captured beside them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.transfers import copying
from tests.support.models import batches
from tests.support.ranks import is_simulated, on_sim, run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config

POOL = 32
WAYS: dict[str, dict[str, Any]] = {
    "inside of the step": {"hide_transfers": False, "overlap_step": False},
    "beside the next step": {"hide_transfers": True},
    "exact": {"update_rule": "exact", "gradients_on_host": False},
}


def copies_apart() -> dict[str, bool]:
    """Whether copies of each way run on a stream of their own, and on none of a whole pool."""
    from tests.support.simulated_accelerator import simulation

    accelerator = get_accelerator()
    theirs = {accelerator.Stream().stream_id for _ in range(POOL)}

    def are_apart(spans: list[Any]) -> bool:
        used = {span.stream for span in spans if span.lane in ("copy down", "copy up")} - {0}
        return bool(used) and not used & theirs

    found = {}
    for name, way in WAYS.items():
        engine = make_engine(zenflow_config(3, **way))
        with simulation.timeline() as spans:
            train(engine, batches(3, 0))
        engine.destroy()
        found[name] = are_apart(spans)
    return found


def test_copies_share_no_stream_with_others_of_the_process() -> None:
    """A communicator's stream is of the pool, so copies would wait for its collectives."""
    (found,) = on_sim(copies_apart)
    assert found == dict.fromkeys(WAYS, True)


def test_an_accelerator_without_priorities_has_streams_too() -> None:
    class Plain:
        def Stream(self) -> str:  # noqa: N802 (DeepSpeed's name)
            return "a stream"

    with patch.object(copying, "get_accelerator", Plain):
        assert copying.new_stream() == "a stream"


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
