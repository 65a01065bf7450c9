"""What one rank alone cannot restore, read or hold is an error on every rank."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_ext.checkpoint.file import SavedFile
from deepspeed_ext.errors import CheckpointError, OutOfMemoryError, WorkerError
from deepspeed_ext.runtime import proc as memory
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import CONFIG
from tests.support.crash.driver import JointCheckpointEngine as Joint
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except (CheckpointError, WorkerError, OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_beside_the_dead(config: dict) -> dict[str, Any]:
    """Rank 0's worker dies with an update in flight; state is read, exact weights are wanted, a
    step is made."""
    engine = make_engine(config)
    data = batches(6, dist.get_rank())
    train(engine, data[:5])
    engine.optimizer.host_optimizer.state.drain()
    process = engine.optimizer.host_optimizer.link.process
    if dist.get_rank() == 0:
        os.kill(process.pid, signal.SIGSTOP)
    train(engine, data[5:])
    if dist.get_rank() == 0:
        os.kill(process.pid, signal.SIGKILL)
    dist.barrier()
    values = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]

    def look() -> None:
        with engine.optimizer.exact_weights():
            pass

    found = {
        "nan": any(bool(value.isnan().any()) for value in values),
        "exact": said(look),
        "step": said(lambda: train(engine, batches(4, dist.get_rank()))),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_state_is_read_while_a_worker_is_dead(stage: int) -> None:
    outcomes = run_ranks(2, read_beside_the_dead, zenflow_config(stage))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["nan"]
    for what in ("exact", "step"):
        assert outcomes[0][what].startswith("WorkerError: rank 0: ")
        assert "SIGKILL" in outcomes[0][what]


def start_with_little_memory(config: dict, available: int) -> str:
    """Every rank alone would fit, all together do not."""
    with patch.object(memory, "available_by_limit", lambda *_: {"machine": available}):
        return said(lambda: make_engine(config))


def test_memory_is_that_of_all_ranks_of_a_host() -> None:
    engine_bytes = run_ranks(1, arena_bytes, zenflow_config(2))[0]
    messages = run_ranks(2, start_with_little_memory, zenflow_config(2), engine_bytes * 3 // 4)
    assert messages[0] == messages[1]
    assert messages[0].startswith("OutOfMemoryError: ")
    assert "2 ranks" in messages[0]


def arena_bytes(config: dict) -> int:
    engine = make_engine(config)
    layout = engine.optimizer.host_optimizer.link.arena.layout
    engine.destroy()
    return sum(spec.nbytes for spec, _ in layout.arrays)


def test_latest_that_cannot_be_replaced(tmp_path: Path) -> None:
    """The checkpoint is whole all the same, and is loaded by its tag."""
    (tmp_path / "latest").mkdir()
    engine = Joint(CONFIG, RankGroup(None, 0, 1, torch.device("cpu")), leads=True)
    info = SimpleNamespace(tag="t", save_dir=str(tmp_path), save_latest=True)
    engine.begin_save(names_latest=True)
    engine.create(info)
    engine.makedirs(str(tmp_path / "t"), exist_ok=True)
    engine.save({"a": math.pi}, str(tmp_path / "t" / "mp_rank_00_model_states.pt"))
    with pytest.raises(
        CheckpointError, match=r"was saved, but finishing the save failed.*load it by its tag"
    ):
        engine.commit(info)
    engine.begin_load(str(tmp_path), "t")
    file = SavedFile(str(tmp_path / "t" / "mp_rank_00_model_states.pt"))
    assert file.sound["a"] == math.pi
