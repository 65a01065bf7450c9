"""The start of an engine: one block of text on rank 0, errors that are every rank's, and builds
that it waits for or does without."""

from __future__ import annotations

import gc
import os
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deepspeed_ext
from deepspeed_ext.adapter import engine_construction, upstream
from deepspeed_ext.adapter.engine_construction import built_together, existing_objects_left_out
from deepspeed_ext.adapter.upstream import OpBuilder, announced_builds, swapped
from deepspeed_ext.errors import DeepSpeedExtError
from deepspeed_ext.runtime import log as _logging
from tests.support.log import heard
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

NO_DEVICE = "invalid device ordinal"


def logged(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Body of a rank: level and text of all that the start of an engine says."""
    _logging._logged.clear()  # of earlier tests in this process
    with heard() as log:
        engine = make_engine(config)
    engine.destroy()
    return [*log]


def lines_of(stage: int, **zenflow: Any) -> list[str]:
    """The block of rank 0, once it is known to be all that was said but for warnings, each said
    once."""
    first, second = run_ranks(2, logged, zenflow_config(stage, **zenflow))
    (block,) = (text for level, text in first if level == "INFO")
    texts = [text for _, text in first]
    assert len(set(texts)) == len(texts)
    assert [level for level, _ in second if level == "INFO"] == []
    return block.splitlines()


@pytest.mark.parametrize(("ranks", "says"), [(8, []), (10, ["and 2 more ranks; "])])
def test_the_cores_of_eight_ranks_are_told_and_how_many_more_there_are(
    ranks: int, says: list[str]
) -> None:
    plans = [SimpleNamespace(local_rank=i, pytorch={2 * i}, optimizer={99}) for i in range(ranks)]
    plans[0] = SimpleNamespace(local_rank=0, pytorch={0, 1, 2, 5}, optimizer=set())
    binding: Any = SimpleNamespace(agreement=SimpleNamespace(host=SimpleNamespace(ranks=plans)))
    first, second, *lines = engine_construction._cores(binding)
    assert first == "local rank 0: PyTorch on 0-2,5"
    assert second == "local rank 1: PyTorch on 2, optimizer on 99"
    assert [line[: len("and 2 more ranks; ")] for line in lines[6:]] == says


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_start_is_one_block_on_rank_0(stage: int) -> None:
    title, *lines = lines_of(stage, full_warm_up_rounds=40)
    assert title == f"ZeRO stage {stage} on 2 ranks, with"
    assert lines[0].split()[0] == "ZenFlow"
    assert "one per rank; predictive rule" in lines[0]
    assert (
        "the first 40 steps wait for their own update; updates of later steps overlap" in lines[1]
    )
    assert any(line.split()[0] == "flattening" for line in lines) == (stage == 2)
    assert len(lines) <= 8
    (memory,) = (line for line in lines if "a rank holds" in line)
    assert re.search(
        r"holds 0\.\d MiB of the host, 0\.\d MiB of it page-locked, and 0\.\d MiB of the acc",
        memory,
    )


def test_a_start_without_overlap_says_so() -> None:
    assert "every step waits for its own update" in lines_of(2, overlap_step=False)[2]


def told_without_a_device() -> str:
    def set_device(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError(NO_DEVICE)

    patched = patch.object(type(get_accelerator()), "set_device", set_device)
    with patched, pytest.raises(DeepSpeedExtError) as caught, built_together(None):
        get_accelerator().set_device(dist.get_rank())
    return str(caught.value)


def test_a_rank_without_a_device_says_so_on_every_rank() -> None:
    found = run_ranks(2, told_without_a_device)
    assert found[0] == found[1]
    assert "rank 1" in found[0]
    assert NO_DEVICE in found[0]


def mapped_here() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/dev/shm/deepspeed_allreduce_buffer" in line]


def test_ranks_of_tests_make_no_buffers_of_deepspeed() -> None:
    """Those in /dev/shm are made by the start of its communication, and not by ours."""
    assert run_ranks(2, mapped_here) == [[], []]


def test_switched_on_no_operator_is_compiled() -> None:
    """It takes longer than all else of a first start."""
    of_deepspeed = upstream.torch_backend_module.build_shm_op
    deepspeed_ext.enable()
    try:
        assert upstream.torch_backend_module.build_shm_op() is None
    finally:
        deepspeed_ext.disable()
    assert upstream.torch_backend_module.build_shm_op is of_deepspeed


def test_the_lock_of_a_killed_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(upstream.logger, "warning", said.append)
    monkeypatch.setattr(OpBuilder, "jit_load", lambda self, verbose: f"loaded {verbose}")
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", object, raising=False)
    builder = type("Builder", (OpBuilder,), {"__init__": lambda self: None, "name": "an_adam"})
    monkeypatch.setattr(builder, "__abstractmethods__", frozenset())
    locks = [tmp_path / name / "lock" for name in ("an_adam", "another")]
    for lock in locks:
        lock.parent.mkdir()
        lock.touch()
    with swapped(announced_builds()):
        assert builder().jit_load() == "loaded False"
        assert said == [], "the locks are young"
        for lock in locks:
            os.utime(lock, (0, 0))
        assert builder().jit_load() == "loaded False"
    (line,) = said
    assert line.startswith(f"waiting for the lock {locks[0]}, ")
    assert "minutes old" in line


@pytest.mark.parametrize("program_freezes", [False, True])
def test_live_objects_are_left_out_of_collections_in_the_block(program_freezes: bool) -> None:
    gc.unfreeze()  # what tests/conftest.py has frozen
    deleted = weakref.ref(type("Deleted", (), {}))  # a class is in a reference cycle
    if program_freezes:
        gc.freeze()
    try:
        with existing_objects_left_out():
            assert (deleted() is None) is not program_freezes
            assert gc.get_freeze_count() > 10_000
        assert (gc.get_freeze_count() > 10_000) is program_freezes
    finally:
        gc.freeze()
