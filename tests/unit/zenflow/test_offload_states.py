"""`engine.offload_states` and `reload_states`, as a trainer that shares its accelerator with an
inference engine calls them: between any two steps, training goes on to the bit, and the
accelerator's memory is free in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deepspeed_ext.errors import OutOfMemoryError, StateError, WorkerError
from deepspeed_ext.runtime import memory
from tests.support.models import OddModel, batches, on_device, two_groups
from tests.support.optimizer_process import gone
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled(8)
STEPS = 10


class Adapted(OddModel):
    """A frozen parameter amid trained ones, which two groups take in another order."""

    def __init__(self, width: int = 37) -> None:
        super().__init__(width, awkward=True)
        del self.empty
        self.norm.requires_grad_(False)


def first_products() -> None:
    """Multiply matrices in the threads of forward and backward: a device's library allocates
    workspaces then, which stay and would count as something of the engine's."""
    device = get_accelerator().current_device_name()
    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(8, 8, device=device, dtype=dtype)
        linear(torch.ones(8, 8, device=device, dtype=dtype)).sum().backward()


def held(stage: int, rule: str, hidden: bool) -> dict[str, int]:
    """Bytes on the accelerator: before the engine, between steps, while everything is away, and
    back again."""
    accelerator, found = get_accelerator(), {}

    def note(name: str) -> None:
        accelerator.synchronize()
        found[name] = accelerator.memory_allocated()

    first_products()
    data = [on_device(batch) for batch in batches(8, rank=0)]
    note("before")
    config = zenflow_config(stage, hide_transfers=hidden, **RULES[rule])
    # so wide that 70 kB of bias corrections, kept per device, hardly count
    engine = make_engine(config, model=lambda: Adapted(320), groups=two_groups)
    train(engine, data[:5])
    note("between steps")
    engine.offload_states()
    note("away")
    engine.reload_states()
    note("back")
    train(engine, data[5:])
    note("after")
    engine.destroy()
    return found


def losses_of(config: dict[str, Any], rank: int) -> list[float]:
    """Those of a run that is left alone."""
    engine = make_engine(config, model=Adapted, groups=two_groups)
    losses = train(engine, batches(STEPS, rank))
    engine.destroy()
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_is_free_meanwhile(stage: int, rule: str, hidden: bool) -> None:
    found = run_ranks(1, held, stage, rule, hidden, device="accelerator")[0]
    trained = found["between steps"] - found["before"]
    assert found["away"] - found["before"] < 0.1 * trained
    assert found["back"] <= found["between steps"]
    assert found["after"] <= 1.01 * found["between steps"]


def refusals(folder: str) -> list[str]:
    """What is said about a step, a save and a load while states are away; then training goes on."""
    engine = make_engine(zenflow_config(2))
    train(engine, batches(2, rank=0))
    found = []
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    for call in (
        engine.step,
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
    ):
        with pytest.raises(StateError) as error:
            call()
        found.append(str(error.value))
    engine.reload_states()
    engine.reload_states()
    train(engine, batches(2, rank=0))
    engine.save_checkpoint(folder)
    engine.destroy()
    return found


def test_a_step_or_save_meanwhile_is_a_clear_error(tmp_path: Any) -> None:
    for message in run_ranks(1, refusals, str(tmp_path))[0]:
        assert "optim_states" in message
        assert "reload_states" in message


def passes_meanwhile(stage: int) -> None:
    """Forward and backward passes while states are away, then the same run as if they had not been
    tried."""
    rank = deepspeed.comm.get_rank()
    config = zenflow_config(stage)
    expected = losses_of(config, rank)
    engine = make_engine(config, model=Adapted, groups=two_groups)
    first, *others = [on_device(batch) for batch in batches(STEPS, rank)]
    engine.offload_states(pin_memory=False)
    with pytest.raises(StateError, match=r"lp_params.*reload_states.*forward"):
        engine(first)
    engine.reload_states()
    loss = engine(first)
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
    with torch.no_grad():
        assert engine(first) == loss  # which needs the weights only
    with pytest.raises(StateError, match=r"optim_states.*reload_states.*backward"):
        engine.backward(loss)
    engine.reload_states()
    engine.backward(loss)
    engine.step()
    assert [loss.item(), *train(engine, others)] == expected
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_or_backward_meanwhile_is_a_clear_error(stage: int) -> None:
    run_ranks(2, passes_meanwhile, stage)


@contextmanager
def short_host_memory(after: int) -> Iterator[list[int]]:
    """Refuse host memory after this many allocations for states; yields a list that grows with each
    of them."""
    asked: list[int] = []

    def refusing(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_or_refuse(*args: Any, **kwargs: Any) -> Any:
            asked.append(1)
            if len(asked) > after:
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"
                )
            return allocate(*args, **kwargs)

        return allocate_or_refuse

    accelerator = get_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (memory, "_on_host"),
            (accelerator, "pin_memory"),
            (accelerator, "pin_empty_like"),
        ):
            patch.setattr(owner, name, refusing(getattr(owner, name)))
        yield asked


def puts_back(config: dict[str, Any]) -> list[str]:
    """Run out of host memory on the last rank, at another allocation each time; training goes on as
    if it had not."""
    rank, last = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size() - 1
    expected = losses_of(config, rank)
    engine = make_engine(config, model=Adapted, groups=two_groups)
    with short_host_memory(after=1000) as asked:
        engine.offload_states(pin_memory=False)
        engine.reload_states()
    assert len(asked) > 2
    losses, messages = [], []
    for number, batch in enumerate(batches(STEPS, rank)):
        losses += train(engine, [batch])
        after = number * len(asked) // STEPS if rank == last else 1000
        with short_host_memory(after), pytest.raises(OutOfMemoryError) as error:
            engine.offload_states()
        messages.append(str(error.value))
    engine.offload_states()
    engine.reload_states()
    engine.destroy()
    assert losses == expected
    return messages


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stage", "rule"), [(1, "selective"), (2, "predictive"), (2, "selective"), (3, "selective")]
)
def test_if_the_host_is_full_all_ranks_have_all_states_back(stage: int, rule: str) -> None:
    config = zenflow_config(stage, **RULES[rule])
    first, second = run_ranks(2, puts_back, config, device="accelerator")
    assert first == second
    assert all(
        "rank 1: the host has no memory for states to offload" in message for message in first
    )


def dead_worker() -> str:
    engine = make_engine(zenflow_config(2))
    train(engine, batches(2, rank=0))
    pid = engine.optimizer.host_optimizer.link.process.pid
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    with pytest.raises(WorkerError) as error:
        train(engine, batches(2, rank=0))
    engine.destroy()
    return str(error.value)


def test_a_dead_worker_is_the_error_of_the_next_step() -> None:
    assert "optimizer process" in run_ranks(1, dead_worker)[0]


def left_between_micro_steps(stage: int, rule: str, dtype: torch.dtype) -> None:
    """The most bytes a parameter that are left while states are away, anywhere in an
    accumulation."""
    config = zenflow_config(stage, dtype, accumulation=3, **RULES[rule])
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    data, found = [on_device(batch) for batch in batches(9, rank=0)], []
    accelerator = get_accelerator()
    before = accelerator.memory_allocated()
    engine = make_engine(config, model=lambda: Adapted(160), groups=two_groups)
    for batch in data:
        train(engine, [batch])
        engine.offload_states()
        found.append(accelerator.memory_allocated() - before)
        engine.reload_states()
    engine.destroy()
    numel = sum(param.numel() for param in Adapted(160).parameters())
    assert max(found) <= 0.05 * numel, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_between_micro_steps_memory_is_free_too(stage: int, rule: str, dtype: torch.dtype) -> None:
    run_ranks(1, left_between_micro_steps, stage, rule, dtype, device="sim")
