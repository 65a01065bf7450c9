"""Calls in a process that user code has forked: each is one error, at once, and the parent trains
on unharmed."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

import deepspeed_ext
from deepspeed_ext.errors import DeepSpeedExtError, StateError
from deepspeed_ext.runtime.process import OwnProcess
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

SECONDS = 20
"""A call that takes longer hangs: SIGALRM ends the child."""


def first(engine: Any) -> Any:
    return next(engine.module.parameters())


def shape_of(engine: Any) -> Any:
    return getattr(first(engine), "ds_shape", first(engine).shape)


CALLS: dict[str, Callable[[Any, str], object]] = {
    "initialize": lambda engine, folder: make_engine(zenflow_config(2, torch.bfloat16)),
    "forward": lambda engine, folder: engine(batches(1, 0)[0]),
    "backward": lambda engine, folder: engine.backward(torch.zeros((), requires_grad=True)),
    "step": lambda engine, folder: engine.step(),
    "save": lambda engine, folder: engine.save_checkpoint(folder, tag="of-the-child"),
    "load": lambda engine, folder: engine.load_checkpoint(folder, tag="before"),
    "offload_states": lambda engine, folder: engine.offload_states(),
    "reload_states": lambda engine, folder: engine.reload_states(),
    "destroy": lambda engine, folder: engine.destroy(),
    "get master": lambda engine, folder: safe_get_full_fp32_param(first(engine)),
    "get moment": lambda engine, folder: safe_get_full_optimizer_state(first(engine), "exp_avg"),
    "set master": lambda engine, folder: safe_set_full_fp32_param(
        first(engine), torch.zeros(shape_of(engine))
    ),
    "optimizer.step": lambda engine, folder: engine.optimizer.step(),
    "optimizer.state_dict": lambda engine, folder: engine.optimizer.state_dict(),
    "exact_weights": lambda engine, folder: engine.optimizer.exact_weights().__enter__(),
    "weight_parts": lambda engine, folder: list(deepspeed_ext.weight_parts(engine)),
    "drain": lambda engine, folder: engine.optimizer.host_optimizer.state.drain(),
    "finish": lambda engine, folder: getattr(engine.checkpoint_engine, "finish", str)(),
}
MAY_PASS = {"finish"}
"""Nothing to do without an async save."""
OF_OWNERS = {"get master", "get moment", "set master"}
"""At stages 1 and 2 only the ranks that own a part ask our optimizer; the others enter DeepSpeed's
collective."""


def called(engine: Any, names: list[str], folder: str, ending: str) -> dict[str, str]:
    """What became of each call in a forked child, which then ends in one of three ways; "" is how
    it ended."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        found = {}
        try:
            for name in names:
                signal.alarm(SECONDS)
                try:
                    CALLS[name](engine, folder)
                    found[name] = "passed"
                except StateError as error:
                    found[name] = "refused" if "forked" in str(error) else str(error)
                except BaseException as error:
                    found[name] = repr(error)
            os.write(writing, pickle.dumps(found))
            signal.alarm(SECONDS)
            if ending == "collected":
                del engine
                gc.collect()
            if ending != "killed":
                atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = pickle.loads(said) if said else {}
    return {**found, "": f"exit status {status}"}


def with_children(config: dict[str, Any], folder: str, seed: int) -> list[Any]:
    """Train with children between the steps; what became of their calls, and of the parent."""
    data, rng = batches(8, dist.get_rank()), random.Random(seed)
    engine = make_engine(config, groups=two_groups)
    plain = train(engine, data)
    expected = plain, weights_of(engine), masters_of(engine)
    engine.destroy()
    engine = make_engine(config, groups=two_groups)
    engine.save_checkpoint(folder, tag="before")
    found: list[Any] = []
    losses = []
    for number, batch in enumerate(data):
        losses += train(engine, [batch])
        if number % 3 == 1:
            # in flight, if it is beside training
            engine.save_checkpoint(folder, tag=f"step-{number}")
        if dist.get_rank() == number % dist.get_world_size():
            all_own = dist.get_world_size() == 1 or engine.zero_optimization_stage() == 3
            known = [name for name in CALLS if all_own or name not in OF_OWNERS]
            names = known if number == 0 else rng.sample(known, 5)
            found.append(called(engine, names, folder, rng.choice(["killed", "left", "collected"])))
    assert (
        first_difference(expected, (losses, weights_of(engine), masters_of(engine)), "training")
        == ""
    )
    engine.save_checkpoint(folder, tag="last")
    engine.destroy()
    dist.barrier()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stage", "beside", "ranks"), [(2, True, 1), (3, False, 1), (1, True, 2), (3, True, 2)]
)
def test_every_call_in_a_forked_process_is_refused_and_the_parent_trains_on(
    stage: int, beside: bool, ranks: int, tmp_path: Any
) -> None:
    config = zenflow_config(stage, torch.bfloat16, async_save=beside)
    for of_rank in run_ranks(ranks, with_children, config, str(tmp_path), stage):
        assert of_rank
        for found in of_rank:
            assert found.pop("") == "exit status 0"
            passed = {name for name, what in found.items() if what == "passed"}
            assert passed <= (set() if beside else MAY_PASS), found
            assert {what for name, what in found.items() if name not in passed} <= {"refused"}, (
                found
            )
    names = {path.name for path in tmp_path.iterdir()}
    names -= {"zero_to_fp32.py", "zero_to_torch.py"}
    assert names == {"latest", "before", "step-1", "step-4", "step-7", "last"}
    assert (tmp_path / "latest").read_text() == "last"


def with_the_module(config: dict[str, Any]) -> Any:
    """A child uses the plain module, as a data loader may."""
    engine = make_engine(config)
    train(engine, batches(2, 0))
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            found = {
                name: param.detach().float().sum().item()
                for name, param in engine.module.named_parameters()
            }
            os.write(writing, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    here = {
        name: param.detach().float().sum().item()
        for name, param in engine.module.named_parameters()
    }
    engine.destroy()
    return found == here


def test_a_forked_process_may_use_the_plain_module() -> None:
    assert run_ranks(1, with_the_module, zenflow_config(2, torch.bfloat16)) == [True]


def test_the_error_names_both_processes() -> None:
    home = OwnProcess("the engine")
    home.require()
    home._pid += 1
    told = f"belongs to process {os.getpid() + 1}, .* in process {os.getpid()}"
    with pytest.raises(DeepSpeedExtError, match=told):
        home.require()
