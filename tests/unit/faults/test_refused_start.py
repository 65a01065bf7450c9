"""If the machine refuses something to one rank at the start, every rank raises an error and nothing
is left behind."""

from __future__ import annotations

import copy
import gc
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import psutil
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.overrides import TorchFunctionMode

import deepspeed_ext
from deepspeed_ext.adapter.engine import Engine
from deepspeed_ext.adapter.stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed_ext.cores.host import WorkerPlacement
from deepspeed_ext.errors import (
    ConfigError,
    DeepSpeedExtError,
    StateError,
    UnsupportedError,
    WorkerError,
)
from deepspeed_ext.runtime import memory as memory_module
from deepspeed_ext.runtime import proc as memory
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.worker import process as process_module
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.limits import limited
from tests.support.models import OddModel, batches, on_device
from tests.support.optimizer_process import PASS, running
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, run, train, zenflow_config

pytestmark = pytest.mark.sampled(4)
starts_workers = pytest.mark.usefixtures("started_workers")
"""Looks at how optimizer processes start, or at the children of a rank."""


def while_it(owner: Any, name: str, limit: int, value: Callable[[], int]) -> AbstractContextManager:
    """Limit a resource while a method runs, and only then: the rest of a start needs it too."""
    original = getattr(owner, name)

    def with_limit(*args: Any) -> Any:
        with limited(limit, value()):
            return original(*args)

    return patch.object(owner, name, with_limit)


def used_address_space() -> int:
    return psutil.Process().memory_info().vms


def limit_that_leaves(free: int = 0) -> int:
    """The limit with so many descriptors free below it. Other tests of the process leave gaps."""
    opened = {int(name) for name in os.listdir("/proc/self/fd")} - {(listing := os.dup(0))}
    os.close(listing)  # the lowest number that is free: the listing had it
    return [n for n in range(len(opened) + free + 1) if n not in opened][free]


def refuse_processes(*args: Any, **kwargs: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")  # as the kernel does at ulimit -u


REFUSALS: dict[str, tuple[Callable[[], AbstractContextManager], str]] = {
    "too little memory": (
        lambda: patch.object(memory, "available_by_limit", lambda *_: {"machine": 1000}),
        "1,000 are available",
    ),
    "address space": (
        lambda: while_it(Arena, "create", resource.RLIMIT_AS, used_address_space),
        "ulimit -v",
    ),
    "file size": (
        lambda: while_it(Arena, "create", resource.RLIMIT_FSIZE, lambda: 4096),
        "File too large",
    ),
    "descriptors, arena": (
        lambda: while_it(Arena, "create", resource.RLIMIT_NOFILE, limit_that_leaves),
        "ulimit -n",
    ),
    "descriptors, process": (
        lambda: while_it(OptimizerProcess, "_launch", resource.RLIMIT_NOFILE, limit_that_leaves),
        "ulimit -n",
    ),
    "no such program": (
        lambda: patch.object(sys, "executable", "/nonexistent/python"),
        "could not be started",
    ),
    "not a program": (lambda: patch.object(sys, "executable", __file__), "could not be started"),
    "processes": (
        lambda: patch.object(process_module.subprocess, "Popen", refuse_processes),
        "ulimit -u",
    ),
}


def open_files() -> Counter[str]:
    """What the descriptors of this process refer to; sockets and pipes without their numbers."""
    gc.collect()
    names = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    return Counter(re.sub(r":\[\d+\]", "", name) for name in names)


def start_refused_on_one_rank(config: dict, refusal: str) -> dict[str, Any]:
    """Rank 1 is refused something; then both ranks start again."""
    rank = dist.get_rank()
    run(config, 1, rank=rank)
    before, message = open_files(), "no error"
    with ExitStack() as stack:
        if rank == 1:
            stack.enter_context(REFUSALS[refusal][0]())
        try:
            make_engine(config)
        except DeepSpeedExtError as error:
            message = str(error)
    left = [child.pid for child in psutil.Process().children()]
    leaked = dict(open_files() - before)
    return {
        "message": message,
        "left": left,
        "leaked": leaked,
        "losses": run(config, 3, rank=rank).losses,
    }


@starts_workers
@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(name, marks=pytest.mark.full)
        if name in ("descriptors, process", "not a program")
        else name
        for name in REFUSALS
    ],
)
def test_refusal_is_an_error_on_every_rank(refusal: str) -> None:
    for outcome in run_ranks(2, start_refused_on_one_rank, zenflow_config(2), refusal):
        assert REFUSALS[refusal][1] in outcome["message"]
        assert outcome["left"] == []
        assert outcome["leaked"] == {}
        assert len(outcome["losses"]) == 3


def start_with_a_bad_config(mistake: dict, on_ranks: tuple[int, ...]) -> tuple[str, str, int]:
    """The config of some ranks has a mistake; then all ranks start."""
    config = zenflow_config(2)
    bad = copy.deepcopy(config)
    for section, fields in mistake.items():
        bad[section] |= fields
    rank, kind, message = dist.get_rank(), "none", ""
    try:
        make_engine(bad if rank in on_ranks else config)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, len(run(config, 2, rank=rank).losses)


def start_with(config: Any, on_rank: int) -> tuple[str, int]:
    """One rank gives `config`; then all ranks start."""
    good, rank, message = zenflow_config(2), dist.get_rank(), "no error"
    deepspeed_ext.enable()
    try:
        model = OddModel().to(torch.bfloat16)
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config if rank == on_rank else good,
        )
    except DeepSpeedExtError as error:
        message = str(error)
    finally:
        deepspeed_ext.disable()
    return message, len(run(good, 2, rank=rank).losses)


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize(
    ("config", "part"),
    [(None, "AssertionError: DeepSpeed requires"), ("cut.json", "DecodeError"), (7, "7")],
)
def test_what_is_no_config_on_one_rank_is_refused_by_all(
    config: Any, part: str, on_rank: int, tmp_path: Path
) -> None:
    (tmp_path / "cut.json").write_text('{"train_batch_size": ')
    given = str(tmp_path / config) if config == "cut.json" else config
    for message, steps in run_ranks(2, start_with, given, on_rank):
        assert re.match(rf"rank {on_rank}: .*{part}", message)
        assert steps == 2


def read_a_bad_config_alone() -> str:
    deepspeed_ext.enable()
    try:
        if dist.get_rank() == 1:
            deepspeed.DeepSpeedConfig({"train_batch_size": 2, "zero_optimization": {"zenflw": {}}})
    except ConfigError as error:
        return str(error)
    finally:
        deepspeed_ext.disable()
    return ""


def test_a_config_read_outside_of_initialize_concerns_no_other_rank() -> None:
    first, second = run_ranks(2, read_a_bad_config_alone)
    assert first == ""
    assert "zenflw is not a field" in second


MISTAKES: dict[str, tuple[dict, str, str]] = {
    "unknown field": (
        {"zero_optimization": {"zenflw": {}}},
        "ConfigError",
        "zenflw is not a field",
    ),
    "unsupported": (
        {"zero_optimization": {"compute_grad_norm": False}},
        "ConfigError",
        "compute_grad_norm",
    ),
    "of DeepSpeed": (
        {"zero_optimization": {"reduce_bucket_size": -1}},
        "ValidationError",
        "reduce_bucket_size",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("on_ranks", [(0,), (1,), (0, 1)])
def test_a_bad_config_of_one_rank_is_refused_by_all(
    mistake: str, on_ranks: tuple[int, ...]
) -> None:
    fields, kind, part = MISTAKES[mistake]
    for found, message, steps in run_ranks(2, start_with_a_bad_config, fields, on_ranks):
        assert found == (kind if len(on_ranks) == 2 or kind == "ConfigError" else "RankError")
        assert part in message
        assert (f"rank {on_ranks[0]}: " in message) == (len(on_ranks) == 1)
        assert steps == 2


def what_happens_with(free: int) -> str:
    """Start a worker and let it work, with so many descriptors free."""
    try:
        with limited(resource.RLIMIT_NOFILE, limit_that_leaves(free)), running() as (_, process):
            process.submit([PASS])
            process.wait()
    except (UnsupportedError, WorkerError) as error:
        return str(error)
    return "works"


def test_any_number_of_free_descriptors_works_or_is_an_error() -> None:
    before = open_files()
    outcomes = [what_happens_with(free) for free in range(14)]
    assert "ulimit -n" in outcomes[0]
    assert outcomes[-1] == "works"
    assert all(outcome == "works" or "Too many open files" in outcome for outcome in outcomes)
    assert not open_files() - before


def test_a_worker_without_its_cpus_runs_elsewhere_and_warns() -> None:
    missing = max(os.sched_getaffinity(0)) + 64
    with running(placement=WorkerPlacement(frozenset({missing}))) as (_, process):
        assert f"cannot bind to CPUs {missing}" in str(process.ready.warning)
        assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
        process.submit([PASS])
        assert process.wait().number == 1


class RefusingRuntime(TorchFunctionMode):
    """An accelerator under a small ``ulimit -l``. As the real one does, it keeps the error of a
    refused call, and raises it when the next kernel is launched."""

    KERNELS = (
        torch.ones,
        torch.zeros,
        torch.Tensor.copy_,
        torch.Tensor.zero_,
        torch.Tensor.fill_,
        torch.Tensor.clone,
    )

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.last_error = 0
        self.locked: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(get_accelerator(), name)

    def is_synchronized_device(self) -> bool:
        return False

    def register_host_memory(self, address: int, nbytes: int) -> bool:
        self.asked += 1
        if nbytes > 4096:
            self.last_error = 2
            raise RuntimeError("CUDA error: out of memory")
        self.locked.add(address)
        return True

    def unregister_host_memory(self, address: int) -> None:
        self.locked.remove(address)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.KERNELS and self.last_error:
            self.last_error = 0
            raise RuntimeError("CUDA error: out of memory")
        return func(*args, **(kwargs or {}))


def train_without_page_locks(config: dict) -> dict[str, Any]:
    expected = run(config, 6, rank=0).losses
    warnings: list[str] = []
    runtime = RefusingRuntime()
    with (
        patch.object(memory_module, "get_accelerator", lambda: runtime),
        patch.object(memory_module, "can_register_host_memory", lambda: True),
        patch.object(memory_module, "warn_once", warnings.append),
    ):
        with runtime:
            engine = make_engine(config)
        losses = train(engine, batches(6, 0))
        engine.destroy()
    same = losses == expected
    return {
        "same": same,
        "asked": runtime.asked >= 1,
        "locked": len(runtime.locked),
        "warnings": warnings,
    }


def test_without_page_locks_there_is_one_warning_and_pageable_copies() -> None:
    found = run_ranks(1, train_without_page_locks, zenflow_config(2))[0]
    (warning,) = found.pop("warnings")
    assert "ulimit -l" in warning
    assert found == {"same": True, "asked": True, "locked": 0}


def what_is_left(before: Counter[str]) -> dict[str, Any]:
    """What deleted engines leave behind: processes, descriptors, and memory of arenas."""
    leaked = open_files() - before
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    arenas = [re.search(r"Rss: +(\d+)", area) for area in areas if "deepspeed_ext-arena" in area]
    return {
        "workers": [child.pid for child in psutil.Process().children()],
        "descriptors": dict(leaked),
        "arena": sum(int(found[1]) for found in arenas if found),
    }


LATE_FAILURES: dict[str, tuple[Any, str]] = {
    "page locks": (memory_module.PageLocks, "lock"),
    "state": (StateStore, "bind"),
    "after the worker": (ZenFlowZeroOptimizer, "_link_all_hp_params"),
    "scheduler": (Engine, "_configure_lr_scheduler"),
    "checkpointing": (Engine, "_configure_checkpointing"),
}


def fail_late(config: dict) -> dict[str, Any]:
    """Constructors that fail at each moment after the worker was started; then an engine that
    works."""
    run(config, 1, rank=0)
    before = open_files()
    found: dict[str, Any] = {}
    masks = os.sched_getaffinity(0)
    arena = what_is_left(before)["arena"]
    for name, (owner, method) in LATE_FAILURES.items():
        try:
            with patch.object(owner, method, side_effect=MemoryError("injected")):
                make_engine(config)
        except (MemoryError, DeepSpeedExtError):  # the latter where the ranks agree
            found[name] = what_is_left(before)
            found[name]["arena"] -= arena
    found["masks"] = masks == os.sched_getaffinity(0)
    found["losses"] = len(run(config, 2, rank=0).losses)
    return found


@starts_workers
def test_a_constructor_that_fails_late_leaves_nothing_behind() -> None:
    config = zenflow_config(2)
    config["zero_optimization"]["core_binding"] = {"enabled": True}
    nothing = {"workers": [], "descriptors": {}, "arena": 0}
    expected = dict.fromkeys(LATE_FAILURES, nothing) | {"masks": True, "losses": 2}
    assert run_ranks(1, fail_late, config) == [expected]


def forget(config: dict) -> dict[str, Any]:
    """Train without `destroy`, and drop the engine; its model computes what it did. Then drop the
    model."""
    run(config, 1, rank=0)
    before = open_files()
    arena = what_is_left(before)["arena"]
    engine = make_engine(config)
    train(engine, batches(2, 0))
    model, batch = engine.module, on_device(batches(1, 0)[0])
    was = engine(batch).item()
    del engine
    found = what_is_left(before)
    if config["zero_optimization"]["stage"] < 3:  # else its weights stay partitioned
        found["same"] = model(batch).item() == was
    del model
    found["arena"] = what_is_left(before)["arena"] - arena
    return found


@starts_workers
def test_a_deleted_engine_leaves_nothing_behind() -> None:
    nothing = {"workers": [], "descriptors": {}, "arena": 0, "same": True}
    assert run_ranks(1, forget, zenflow_config(2)) == [nothing]
    found = run_ranks(1, forget, zenflow_config(3))[0]
    assert found["workers"] == []  # DeepSpeed keeps its optimizer of stage 3 even after `destroy`
    assert found["descriptors"] == {}


def build_another(config: dict) -> tuple[list[float], list[float]]:
    """A second engine for a model is refused, and the first trains on; it comes after `destroy`, or
    if the first is deleted, or trains something else of the model."""
    engine, data = make_engine(config), batches(5, 0)
    model, losses = engine.module, train(engine, data[:2])
    for leave in (engine.destroy, lambda: None):
        with pytest.raises(StateError, match="call its destroy"):
            make_engine(config, model=lambda: model)
        losses += train(engine, data[2:4])
        leave()
        del engine
        engine = make_engine(config, model=lambda: model)
    losses += train(engine, data[4:])
    engine.destroy()
    whole = torch.nn.Sequential(OddModel(), OddModel())  # as a GAN's
    for part in whole:
        make_engine(config, model=lambda: whole, groups=lambda _: list(part.parameters()))  # noqa: B023
    return losses, run(config, 4, rank=0).losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_has_one_engine_at_a_time(stage: int) -> None:
    config = zenflow_config(stage)
    losses, expected = run_ranks(1, build_another, config)[0]
    assert losses[:4] == expected


def forget_after_the_communication(config: dict) -> dict[str, Any]:
    """Train, and drop the engine where the process group seems to have ended, as some trainers end
    it."""
    before, ignored = open_files(), []
    engine = make_engine(config)
    train(engine, batches(2, 0))
    with (
        patch.object(sys, "unraisablehook", lambda raised: ignored.append(str(raised.exc_value))),
        patch.object(torch.distributed, "is_initialized", return_value=False),
    ):
        del engine
        gc.collect()
    return {"ignored": ignored, "workers": what_is_left(before)["workers"]}


@starts_workers
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_is_deleted_after_the_communication_has_ended_says_nothing(
    stage: int,
) -> None:
    expected: dict[str, Any] = {"ignored": [], "workers": []}
    assert run_ranks(1, forget_after_the_communication, zenflow_config(stage)) == [expected]


def fail_to_destroy(config: dict) -> dict[str, Any]:
    run(config, 1, rank=0)
    before, raised = open_files(), False
    masks = os.sched_getaffinity(0)
    engine = make_engine(config)
    try:
        with patch.object(DeepSpeedZeroOptimizer, "destroy", side_effect=RuntimeError("injected")):
            engine.destroy()
    except RuntimeError:
        raised = True
    left = what_is_left(before)
    return {"raised": raised, "left": left["workers"], "masks": masks == os.sched_getaffinity(0)}


@starts_workers
def test_destroy_ends_the_worker_and_the_binding_even_if_deepspeed_fails() -> None:
    config = zenflow_config(2)
    config["zero_optimization"]["core_binding"] = {"enabled": True}
    assert run_ranks(1, fail_to_destroy, config) == [{"raised": True, "left": [], "masks": True}]
