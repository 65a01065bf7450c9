"""What the machine refuses one rank at the start is an error on every rank, and nothing is left of it."""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from deepspeed import comm as dist

from deepspeed_ext import memory
from deepspeed_ext._errors import DeepSpeedExtError, UnsupportedError, WorkerError
from deepspeed_ext.affinity.worker import WorkerPlace
from deepspeed_ext.zenflow import process as process_module
from deepspeed_ext.zenflow import transfers as transfers_module
from deepspeed_ext.zenflow.arena import Arena
from deepspeed_ext.zenflow.process import OptimizerProcess
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, run, train, zenflow_config
from tests.unit.test_zenflow_process import PASS, running


@contextmanager
def limited(limit: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def while_it(owner: Any, name: str, limit: int, value: Callable[[], int]) -> AbstractContextManager:
    """Limit a resource while a method runs, and only then: the rest of a start needs it too."""
    original = getattr(owner, name)

    def with_limit(*args: Any) -> Any:
        with limited(limit, value()):
            return original(*args)

    return patch.object(owner, name, with_limit)


def used_address_space() -> int:
    return psutil.Process().memory_info().vms


def next_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def refuse_processes(*args: Any, **kwargs: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")  # as the kernel does at ulimit -u


REFUSALS: dict[str, tuple[Callable[[], AbstractContextManager], str]] = {
    "too little memory": (lambda: patch.object(memory, "available_host_bytes", lambda: 1000), "1,000 are available"),
    "address space": (lambda: while_it(Arena, "create", resource.RLIMIT_AS, used_address_space), "ulimit -v"),
    "file size": (lambda: while_it(Arena, "create", resource.RLIMIT_FSIZE, lambda: 4096), "File too large"),
    "descriptors, arena": (lambda: while_it(Arena, "create", resource.RLIMIT_NOFILE, next_descriptor), "ulimit -n"),
    "descriptors, process": (
        lambda: while_it(OptimizerProcess, "_launch", resource.RLIMIT_NOFILE, next_descriptor),
        "ulimit -n",
    ),
    "no such program": (lambda: patch.object(sys, "executable", "/nonexistent/python"), "could not be started"),
    "not a program": (lambda: patch.object(sys, "executable", __file__), "could not be started"),
    "processes": (lambda: patch.object(process_module.subprocess, "Popen", refuse_processes), "ulimit -u"),
}


def open_files() -> Counter[str]:
    """What the descriptors of this process are, sockets and pipes without their numbers."""
    gc.collect()
    names = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    return Counter(re.sub(r":\[\d+\]", "", name) for name in names)


def start_refused_on_one_rank(config: dict, refusal: str) -> dict[str, Any]:
    """Rank 1 is refused something; then both begin anew."""
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
    return {"message": message, "left": left, "leaked": leaked, "losses": run(config, 3, rank=rank).losses}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal_is_an_error_on_every_rank(refusal: str) -> None:
    for outcome in run_ranks(2, start_refused_on_one_rank, zenflow_config(2, update_interval=1), refusal):
        assert REFUSALS[refusal][1] in outcome["message"]
        assert outcome["left"] == []
        assert outcome["leaked"] == {}
        assert len(outcome["losses"]) == 3


def what_happens_with(free: int) -> str:
    """Start a worker and let it work, with so many descriptors free."""
    try:
        with limited(resource.RLIMIT_NOFILE, next_descriptor() + free), running() as (_, process):
            process.submit([PASS])
            process.wait()
    except (UnsupportedError, WorkerError) as error:
        return str(error)
    return "works"


def test_at_any_number_of_free_descriptors_it_works_or_says_why() -> None:
    before = open_files()
    outcomes = [what_happens_with(free) for free in range(10)]
    assert "ulimit -n" in outcomes[0]
    assert outcomes[-1] == "works"
    assert all(outcome == "works" or "Too many open files" in outcome for outcome in outcomes)
    assert not open_files() - before


def test_a_worker_without_its_cpus_runs_where_it_can_and_says_so() -> None:
    missing = max(os.sched_getaffinity(0)) + 64
    with running(place=str(WorkerPlace(frozenset({missing})))) as (_, process):
        assert f"cannot run on CPUs {missing}" in str(process.ready.warning)
        assert set(process.ready.cpus) == os.sched_getaffinity(0)
        process.submit([PASS])
        assert process.wait().number == 1


class RefusingRuntime:
    """An accelerator's runtime under a small ``ulimit -l``."""

    asked = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        RefusingRuntime.asked += 1
        return 0 if nbytes <= 4096 else 2


def train_without_page_locks(config: dict) -> tuple[list[float], list[float], int, list[str]]:
    expected = run(config, 6, rank=0).losses
    warnings: list[str] = []
    with (
        patch.object(transfers_module, "_host_registry", RefusingRuntime),
        patch.object(transfers_module, "warn_once", warnings.append),
        patch.object(transfers_module.Transfers, "unlock", lambda self: None),
    ):
        engine = make_engine(config)
        asked = RefusingRuntime.asked
        losses = train(engine, batches(6, 0))
        engine.destroy()
    return expected, losses, asked, warnings


def test_without_page_locks_there_is_one_warning_and_pageable_copies() -> None:
    expected, losses, asked, warnings = run_ranks(1, train_without_page_locks, zenflow_config(2, update_interval=1))[0]
    assert losses == expected
    assert asked >= 1
    (warning,) = warnings
    assert "ulimit -l" in warning
