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
from deepspeed.utils import safe_get_full_optimizer_state
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.errors import OutOfMemoryError, StateError, WorkerError
from deepspeed_ext.runtime import memory
from tests.support.models import batches, on_device, two_groups
from tests.support.offloaded import Adapted, held
from tests.support.optimizer_process import gone
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import RULES, make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(8)
STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "page-locked": {"pin_memory": True, "non_blocking": True},
    "pageable": {"pin_memory": False},
}


def run(
    config: dict[str, Any], rank: int, away_after: set[int], how: dict[str, Any]
) -> dict[str, Any]:
    engine = make_engine(config, model=Adapted, groups=two_groups)
    losses = []
    for number, batch in enumerate(batches(STEPS, rank), start=1):
        losses += train(engine, [batch])
        if number in away_after:
            engine.offload_states(**how)
            engine.reload_states()
    found = {"losses": losses, "weights": weights_of(engine), "masters": masters_of(engine)}
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    found["m"] = [
        safe_get_full_optimizer_state(param, "exp_avg").cpu().clone() for param in trained
    ]
    engine.destroy()
    return found


def goes_on_to_the_bit(config: dict[str, Any], way: str) -> None:
    how = WAYS[way]
    rank = deepspeed.comm.get_rank()
    expected = run(config, rank, set(), how)
    assert_same(expected, run(config, rank, set(range(1, STEPS + 1)), how), "after every step")
    assert_same(expected, run(config, rank, {7}, how), "after a step in the middle of an interval")


@pytest.mark.parametrize(
    ("stage", "rule"), [(1, "predictive"), (2, "selective"), (3, "predictive"), (3, "selective")]
)
def test_between_micro_steps_of_one_accumulation_too(stage: int, rule: str) -> None:
    run_ranks(
        2, goes_on_to_the_bit, zenflow_config(stage, accumulation=3, **RULES[rule]), "page-locked"
    )


def frozen_stay_what_they_are(stage: int) -> None:
    engine = make_engine(zenflow_config(stage), model=Adapted, groups=two_groups)
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    before = weights_of(engine)
    train(engine, batches(2, rank=0))
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    after = weights_of(engine)
    engine.destroy()
    assert len(frozen) == 3
    assert_same(
        {name: before[name] for name in frozen}, {name: after[name] for name in frozen}, "frozen"
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_keep_their_values(stage: int) -> None:
    run_ranks(2, frozen_stay_what_they_are, stage)


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


class Workspaces(TorchDispatchMode):
    """As a device's library for products: the first one allocates memory that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if not self.kept and function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.kept.append(
                torch.empty(
                    1 << 23, dtype=torch.uint8, device=get_accelerator().current_device_name()
                )
            )
        return function(*args, **(kwargs or {}))


def held_beside_workspaces() -> tuple[dict[str, int], int]:
    with Workspaces() as workspaces:
        found = held(2, "predictive", False)
    return found, len(workspaces.kept)


def test_memory_that_the_first_product_allocates_is_not_taken_for_the_engines() -> None:
    found, workspaces = run_ranks(1, held_beside_workspaces, device="sim")[0]
    assert workspaces == 1
    assert found["away"] - found["before"] < 0.1 * (found["between steps"] - found["before"])


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
    expected = run(config, rank, set(), {})["losses"]
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
    expected = run(config, rank, set(), {})["losses"]
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


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_fp32_weights_come_back(stage: int) -> None:
    config = zenflow_config(stage, torch.float32, accumulation=3)
    run_ranks(2, goes_on_to_the_bit, config, "page-locked", device="sim")
