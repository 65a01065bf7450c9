"""`engine.offload_states` and `reload_states`, as a trainer that shares its accelerator with an inference engine calls
them: between any two steps, training goes on to the bit, and the accelerator's memory is free in between."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_optimizer_state

from deepspeed_ext._errors import StateError, WorkerError
from tests.support.matrix import some
from tests.support.models import OddModel, batches, on_device, two_groups
from tests.support.optimizer_process import gone
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import RULES, make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(2)
STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "page-locked": {"pin_memory": True, "non_blocking": True},
    "pageable": {"pin_memory": False},
}


class Adapted(OddModel):
    """A frozen parameter amid trained ones, which two groups take in another order."""

    def __init__(self, width: int = 37) -> None:
        super().__init__(width, awkward=True)
        del self.empty
        self.norm.requires_grad_(False)


def run(config: dict[str, Any], rank: int, away_after: set[int], how: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(config, model=Adapted, groups=two_groups)
    losses = []
    for number, batch in enumerate(batches(STEPS, rank), start=1):
        losses += train(engine, [batch])
        if number in away_after:
            engine.offload_states(**how)
            engine.reload_states()
    found = {"losses": losses, "weights": weights_of(engine), "masters": masters_of(engine)}
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    found["m"] = [safe_get_full_optimizer_state(param, "exp_avg").cpu().clone() for param in trained]
    engine.destroy()
    return found


def goes_on_to_the_bit(config: dict[str, Any], way: str) -> None:
    how = WAYS[way]
    rank = deepspeed.comm.get_rank()
    expected = run(config, rank, set(), how)
    assert_same(expected, run(config, rank, set(range(1, STEPS + 1)), how), "after every step")
    assert_same(expected, run(config, rank, {7}, how), "after a step in the middle of an interval")


@pytest.mark.parametrize(
    ("stage", "rule", "ranks", "way"), some(list(itertools.product((1, 2, 3), RULES, (1, 2), WAYS)))
)
def test_training_goes_on_to_the_bit(stage: int, rule: str, ranks: int, way: str) -> None:
    run_ranks(ranks, goes_on_to_the_bit, zenflow_config(stage, **RULES[rule]), way)


@pytest.mark.parametrize("stage", [2, 3])
def test_at_interval_1_an_update_is_always_in_flight(stage: int) -> None:
    run_ranks(2, goes_on_to_the_bit, zenflow_config(stage, update_interval=1), "page-locked")


def frozen_stay_what_they_are(stage: int) -> None:
    engine = make_engine(zenflow_config(stage, update_interval=1), model=Adapted, groups=two_groups)
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    before = weights_of(engine)
    train(engine, batches(2, rank=0))
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    after = weights_of(engine)
    engine.destroy()
    assert len(frozen) == 3
    assert_same({name: before[name] for name in frozen}, {name: after[name] for name in frozen}, "frozen")


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_keep_their_values(stage: int) -> None:
    run_ranks(2, frozen_stay_what_they_are, stage)


def held(stage: int, rule: str, hidden: bool) -> dict[str, int]:
    """Bytes on the accelerator: before the engine, between steps, while everything is away, and back again."""
    accelerator, found = get_accelerator(), {}

    def note(name: str) -> None:
        accelerator.synchronize()
        found[name] = accelerator.memory_allocated()

    note("before")
    config = zenflow_config(stage, hide_transfers=hidden, **RULES[rule])
    engine = make_engine(config, model=lambda: Adapted(160), groups=two_groups)
    data = [on_device(batch) for batch in batches(8, rank=0)]
    note("inputs")
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
    engine = make_engine(zenflow_config(2, update_interval=1))
    train(engine, batches(2, rank=0))
    found = []
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    for call in (engine.step, lambda: engine.save_checkpoint(folder), lambda: engine.load_checkpoint(folder)):
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


def dead_worker() -> str:
    engine = make_engine(zenflow_config(2, update_interval=1))
    train(engine, batches(2, rank=0))
    pid = engine.optimizer.zenflow_adam.link.process.pid
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
