"""A dead worker ends every rank, within seconds, with one error that says which process died and what to do."""

import os
import signal
import time

import psutil
import pytest
from deepspeed import comm as dist

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.zenflow.process import OptimizerProcess
from tests.support.models import batches
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def kill_and_train(config: dict, when: str) -> tuple[str, float]:
    rank = dist.get_rank()
    if when == "starting" and rank == 0:
        launch = OptimizerProcess._launch

        def launch_and_kill(self, *args):
            process, connection = launch(self, *args)
            process.kill()
            return process, connection

        OptimizerProcess._launch = launch_and_kill
    begin = time.monotonic()
    try:
        engine = make_engine(config)
        train(engine, batches(4, rank))
        process = engine.optimizer.zenflow_adam.process
        if rank == 0:
            if when == "stepping":  # it has work, and dies before it can answer
                engine.optimizer.zenflow_adam.drain()
                os.kill(process.pid, signal.SIGSTOP)
                train(engine, batches(1, rank))
            os.kill(process.pid, signal.SIGKILL)
        elif when == "stepping":
            train(engine, batches(1, rank))
        begin = time.monotonic()
        train(engine, batches(20, rank))
    except WorkerError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


@pytest.mark.parametrize("when", ["idle", "stepping", "starting"])
def test_killed_worker_ends_all_ranks(when: str) -> None:
    outcomes = run_fresh_ranks(2, kill_and_train, zenflow_config(2, update_interval=1), when)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        message, seconds = outcome.value
        assert "rank 0" in message
        assert "SIGKILL" in message
        assert "checkpoint" in message
        # Until a start is refused, the trainer builds its engine: that is not part of the five seconds.
        assert seconds < (60 if when == "starting" else 5)


def train_and_destroy(config: dict) -> list[bool]:
    """Two engines at once, then none: are their workers gone?"""
    engines = [make_engine(config), make_engine(config)]
    pids = [engine.optimizer.zenflow_adam.process.pid for engine in engines]
    for engine in engines:
        train(engine, batches(2, 0))
    for engine in engines:
        engine.destroy()
        engine.destroy()
    return [psutil.pid_exists(pid) for pid in pids]


@pytest.mark.parametrize("stage", [2, 3])
def test_destroy_ends_the_workers(stage: int) -> None:
    assert run_ranks(1, train_and_destroy, zenflow_config(stage)) == [[False, False]]
