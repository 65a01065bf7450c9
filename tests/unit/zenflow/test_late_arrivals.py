"""When and in which order weights arrive in the forward, and what is seen if they never do."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.plan.places import Wait
from deepspeed_ext.zenflow.transfers.stream import Stream
from tests.support.models import Branches, batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, small_chunks, train, zenflow_config

pytestmark = pytest.mark.sampled()


def arrivals(config: dict[str, Any]) -> list[Any]:
    """How many chunks of weights are on their way before each forward, behind it and behind
    backward; and how many once somebody has the slots of coming gradients, in which y may be."""
    with small_chunks():
        engine = make_engine(config, model=Branches)
        host, found = engine.optimizer.host_optimizer, []
        assert host.decided.wait is Wait.FORWARD
        assert host.first_steps is None
        for first_token in (1, 1, 0, 0):
            batch = batches(1, dist.get_rank())[0]
            batch[0, 0] = first_token
            before = len(host.link.stream._awaited)
            loss = engine(on_device(batch))
            during = len(host.link.stream._awaited)
            engine.backward(loss)
            after = len(host.link.stream._awaited)
            engine.step()
            found.append((before, during, after))
        for index in range(len(host.state.partitions)):
            host.coming_slot(index)
        found.append(len(host.link.stream._awaited))
        engine.destroy()
    return found


def measures_its_first_steps(config: dict[str, Any]) -> bool:
    engine = make_engine(config)
    host = engine.optimizer.host_optimizer
    train(engine, batches(4, 0))
    found = host.first_steps is not None and host.measurements()["zenflow_gather_ms"] > 0.0
    engine.destroy()
    return found


def test_what_limits_a_step_is_measured_where_weights_do_not_arrive_in_the_forward() -> None:
    config = zenflow_config(2, update_rule="exact")
    assert run_ranks(1, measures_its_first_steps, config, device="sim") == [True]


def persistent_after_steps(config: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Of each persistent parameter after each step: is it whole, and p."""
    engine, found = make_engine(config), []
    assert engine.optimizer.host_optimizer.decided.wait is Wait.FORWARD
    for batch in batches(3, dist.get_rank()):
        train(engine, [batch])
        shown = [
            (param, param.detach().clone())
            for param in engine.module.parameters()
            if param.ds_persist
        ]
        for param, value in shown:
            p = safe_get_full_fp32_param(param).to(value.dtype)
            found.append((value.numel() == param.ds_numel, torch.equal(value, p)))
    engine.destroy()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_persistent_parameters_are_whole_when_a_step_returns(ranks: int) -> None:
    for found in run_ranks(ranks, persistent_after_steps, zenflow_config(3, update_rule="exact")):
        assert len(found) > 3
        assert all(whole and same for whole, same in found)


def test_weights_arrive_when_forward_uses_them_and_before_backward() -> None:
    config = zenflow_config(3, update_rule="exact")
    config["zero_optimization"] |= {"sub_group_size": 250, "stage3_param_persistence_threshold": 0}
    ((*found, left),) = run_ranks(1, arrivals, config, pool="exact True")
    assert left == 0
    total = found[1][0]
    assert total > 2
    assert found[:2] == [(0, 0, 0), (total, 0, 0)]
    for before, during, after in found[2:]:  # one layer is not used, and not prefetched
        assert (before, after) == (total, 0)
        assert during > 0


def departures(config: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """The chunks of each step, in the order in which they depart."""
    found: list[list[tuple[int, int]]] = []
    expect = Stream.expect

    def noting(self: Stream, indices: Any) -> None:
        indices = list(indices)
        found.append([(index, span.begin) for index, span in self.chunks.in_order(indices)])
        expect(self, indices)

    with patch.object(Stream, "expect", noting):
        engine = make_engine(config, model=Backwards)
        train(engine, batches(3, dist.get_rank()))
        engine.destroy()
    return [step for step in found if step]


class Backwards(torch.nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.first = torch.nn.Embedding(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(tokens))).float().square().mean()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_chunks_depart_in_the_order_in_which_the_last_forward_used_them(device: str) -> None:
    config = zenflow_config(3, update_rule="exact")
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": 0,
        "sub_group_size": 250,
        "stage3_param_persistence_threshold": 0,
    }
    (found,) = run_ranks(1, departures, config, device=device, pool="exact True")
    natural, *later = found
    assert natural == sorted(natural)
    assert len(natural) > 2
    # after the first forward that waits; the embedding is registered last and used first
    assert later == [[natural[-1], *natural[:-1]]] * 2


# -- errors ----------------------------------------------------------------------------------------


def nothing_persists() -> dict[str, Any]:
    """A step waits for nothing: all parameters are gathered in the forward."""
    config = zenflow_config(3, update_rule="exact")
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def after_a_death(config: dict[str, Any]) -> list[Any]:
    """One rank's worker dies while weights are on their way."""
    engine = make_engine(config)
    data = [on_device(batch) for batch in batches(2, dist.get_rank())]
    worker, dies = engine.optimizer.host_optimizer.link.process, dist.get_rank() == 1
    engine.backward(engine(data[0]))
    if dies:
        os.kill(worker.pid, signal.SIGSTOP)
    engine.step()  # waits for nothing of this step
    if dies:
        os.kill(worker.pid, signal.SIGKILL)
    loss = engine(data[1])
    found: list[Any] = [bool(loss.isnan())]
    engine.backward(loss)
    try:
        engine.step()
    except WorkerError as error:
        found.append("rank 1" in str(error))
    engine.destroy()
    return found


def test_if_a_worker_dies_missing_weights_are_nan_and_every_rank_gets_the_error() -> None:
    found = run_ranks(2, after_a_death, nothing_persists(), pool="exact True")
    assert found == [[True, True]] * 2


def waited_for_after_a_death(config: dict[str, Any]) -> bool:
    """Whether weights that can no longer arrive are NaN once somebody has waited for all of them,
    and used none."""
    engine = make_engine(config)
    engine.backward(engine(on_device(batches(1, 0)[0])))
    host = engine.optimizer.host_optimizer
    os.kill(host.link.process.pid, signal.SIGSTOP)
    engine.step()
    os.kill(host.link.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        host.link.wait_together()
    is_lost = any(bool(each.weights().isnan().any()) for each in host.state.partitions)
    engine.destroy()
    return is_lost


def test_weights_that_a_dead_worker_leaves_behind_do_not_look_right() -> None:
    config = nothing_persists()
    assert run_ranks(1, waited_for_after_a_death, config, pool="exact True") == [True]
