"""Three ranks: partitions with a remainder, and errors that must reach every rank."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm as dist

from deepspeed_ext.errors import CheckpointError, WorkerError
from tests.support.limits import limited
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import (
    RULES,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled(2)

RANKS = 3
FAILING = 1
GOOD, STEPS = 5, 10


def message_of(error: type[Exception], action: Any) -> str:
    """The error that `action` ends with, or that it has none."""
    try:
        action()
    except error as raised:
        return str(raised)
    return "no error"


def train_save_and_load(config: dict, folder: str) -> dict[str, Any]:
    """Save mid-interval; a save fails on one rank; load into a new engine; then the worker of one
    rank dies."""
    rank = dist.get_rank()
    data = batches(STEPS, rank)
    engine = make_engine(offload_config(config), extended=False)
    upstream = train(engine, data)
    engine.destroy()

    engine = make_engine(config)
    losses = train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="good")
    with limited(resource.RLIMIT_FSIZE, 8 * 1024 if rank == FAILING else resource.RLIM_INFINITY):
        refused = message_of(CheckpointError, lambda: engine.save_checkpoint(folder, tag="good"))
    losses += train(engine, data[GOOD:])
    weights = weights_of(engine)
    engine.destroy()

    engine = make_engine(config)
    engine.load_checkpoint(folder, tag="good")
    resumed = train(engine, data[GOOD:])
    if rank == FAILING:
        os.kill(engine.optimizer.host_optimizer.link.process.pid, signal.SIGKILL)
    lost = message_of(WorkerError, lambda: train(engine, data))
    engine.destroy()
    return {
        "losses": losses,
        "upstream": upstream,
        "resumed": resumed,
        "weights": weights,
        "refused": refused,
        "lost": lost,
    }


@pytest.mark.parametrize(("stage", "rule"), [(2, "predictive"), (3, "selective")])
def test_three_ranks_train_save_load_and_fail_together(
    stage: int, rule: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        RANKS, train_save_and_load, zenflow_config(stage, **RULES[rule]), str(tmp_path)
    )
    for found in outcomes:
        assert found["losses"] == pytest.approx(found["upstream"], rel=0.05)
        assert found["resumed"] == found["losses"][GOOD:]
        assert_same(outcomes[0]["weights"], found["weights"], "weights")
        assert f"rank {FAILING}" in found["refused"]
        assert f"rank {FAILING}" in found["lost"]
        assert "SIGKILL" in found["lost"]
