"""Closing ends whatever the accelerator does: it waits for copies under way, but not for ever."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.transfers import page_locks as page_locks_module
from deepspeed_ext.zenflow.transfers import stream as stream_module
from deepspeed_ext.zenflow.transfers.page_locks import PageLocks
from deepspeed_ext.zenflow.worker.kernel import Publish
from deepspeed_ext.zenflow.worker.messages import WorkerTask
from tests.support.models import Linears, batches, on_device
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.streams import plan_of, stream_of
from tests.support.zenflow import make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled()

AT_ONCE_SECONDS = 30.0
"""Far below the group's timeout, and far above what anything here takes."""


def left_alone(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Launch a collective that the other rank never launches; then end as `how` says."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    if dist.get_rank() == 0:
        # only the stream waits
        dist.all_reduce(torch.ones(1, device=get_accelerator().current_device_name()))
    locks = engine.optimizer.host_optimizer.link.page_locks
    begin, locked = time.monotonic(), list(locks._locked.values())
    if how == "exit":
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    else:
        with patch.object(stream_module, "_CLOSE_SECONDS", 0.5):
            engine.optimizer.host_optimizer.close()
    return {
        "seconds": time.monotonic() - begin,
        "locked before": len(locked),
        "still locked": sum(tensor.is_pinned() for tensor in locked),
        "left": sum(isinstance(left, torch.Tensor) for left in page_locks_module._left),
    }


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("how", ["exit", "close"])
def test_a_rank_that_others_have_left_ends(how: str, hidden: bool) -> None:
    config = zenflow_config(2, hide_transfers=hidden)
    ended = run_fresh_ranks(
        2, left_alone, config, how, device="sim", group_timeout_seconds=4 * AT_ONCE_SECONDS
    )
    assert [rank.error for rank in ended] == [None, None]
    for rank, found in enumerate(outcome.value for outcome in ended):
        assert found["seconds"] < AT_ONCE_SECONDS
        assert found["locked before"] > 0
        # What rank 0 has launched may be behind the collective; those of rank 1 have ended.
        stays = how == "exit" or rank == 0
        assert found["still locked"] == (found["locked before"] if stays else 0)
        assert found["left"] == (found["locked before"] if how == "close" and rank == 0 else 0)


def closed_with_results_on_their_way(numel: int) -> None:
    """Free a room whose results are still on their way up, and use its memory again."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    stream, arena, _ = stream_of(plan_of([numel], "beside"))
    locks = PageLocks()
    locks.lock([arena.tensor("g")])
    stream.take(0, torch.ones(numel, device=device), arena.tensor("g"), stream.ready())
    stream.depart([WorkerTask(0, 0, None, 1)], {})
    stream.wait()
    assert stream.close()
    locks.unlock()
    del stream
    other = torch.full((numel,), 2.0, device=device)
    assert bool((other.cpu() == 2.0).all())


def test_a_room_is_free_once_its_results_have_arrived_also_if_nothing_is_locked() -> None:
    run_ranks(1, closed_with_results_on_their_way, 1 << 14, device="sim")


def behind_a_busy_worker(config: dict[str, Any], millions: int) -> tuple[str, float]:
    """Step while the worker of rank 0 makes progress, but not enough."""
    engine = make_engine(config, model=partial(Linears, millions))
    rows = on_device(torch.randn(1, 1024).bfloat16())
    train(engine, [rows] * 2)
    adam = engine.optimizer.host_optimizer
    if dist.get_rank() == 0:
        publish = WorkerTask(0, 0, Publish.exact(1.0, 1e-8))
        for _ in range(10_000):
            adam.link.process.submit([publish])
    begin = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        train(engine, [rows] * 2)
    return str(raised.value), time.monotonic() - begin


@pytest.mark.full
def test_a_wait_with_progress_ends_on_all_ranks_before_their_collective_does() -> None:
    config = zenflow_config(2, worker_timeout_seconds=10)
    seconds = 30.0
    ended = run_fresh_ranks(2, behind_a_busy_worker, config, 32, group_timeout_seconds=seconds)
    assert [rank.error for rank in ended] == [None, None]
    for told, waited in (rank.value for rank in ended):
        assert "rank 0: the optimizer process" in told
        assert "was still busy after 24 s" in told
        assert "DEEPSPEED_TIMEOUT" in told
        assert waited < seconds
