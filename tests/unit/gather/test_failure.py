"""A rank that dies or falls silent during a gather ends the others with an error."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gather import OURS, engine_for
from tests.support.models import batches, on_device
from tests.support.ranks import run_fresh_ranks
from tests.support.waiting import GENEROUS_SECONDS, wait_until

SILENCE_SECONDS = 5.0
"""The timeout of the group that the parameters are gathered in."""


class FailingGather:
    """Stands in front of the gather of one rank; at the third fetch the rank dies, or waits until
    `over` exists."""

    def __init__(self, gather: Any, over: Path | None) -> None:
        self.gather, self.over, self.calls = gather, over, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls < 3:
            return self.gather(*args, **kwargs)
        if self.over is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            wait_until(self.over.exists, "the error of the other rank")
        raise RuntimeError("it has been silent")


def train(engine: Any) -> None:
    for batch in batches(3, 0):
        engine.backward(engine(on_device(batch)))
        engine.step()


def gather_with_short_timeout(parameters: list[Any]) -> None:
    """Use a group of its own: gloo keeps the timeout that a group was made with in torch 2.6 and
    2.7."""
    torch.distributed.barrier()  # so that the ranks make it at the same time
    group = torch.distributed.new_group(timeout=timedelta(seconds=SILENCE_SECONDS))
    for parameter in parameters:
        parameter.ds_process_group = group


def body(over: Path | None, min_numel: int) -> str:
    """The error with which training ends; the rank that is awaited is silent until `over` exists,
    or dies."""
    engine = engine_for(OURS | {"stage3_single_param_min_numel": min_numel})
    parameters = list(engine.module.parameters())
    if over is not None:
        gather_with_short_timeout(parameters)
    if torch.distributed.get_rank() == 1:
        failing = FailingGather(engine.parameter_gather, over)
        for parameter in parameters:
            parameter.all_gather_coalesced = failing
    with pytest.raises(RuntimeError) as error:
        train(engine)
    if over is not None:
        over.touch()
    return str(error.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dies", "min_numel"), [(True, 0), (False, 10_000)], ids=["killed", "silent"]
)
def test_the_other_rank_ends_with_an_error(dies: bool, min_numel: int, tmp_path: Path) -> None:
    """The group itself would wait for ten times the bound within which the survivor must end."""
    survivor, failed = run_fresh_ranks(
        2,
        body,
        None if dies else tmp_path / "over",
        min_numel,
        timeout_seconds=GENEROUS_SECONDS,
        group_timeout_seconds=10 * GENEROUS_SECONDS,
    )
    assert survivor.error is None, survivor.error
    if dies:
        assert failed.exit_code == -signal.SIGKILL
        assert any(
            how in survivor.value for how in ("closed by peer", "reset by peer", "Broken pipe")
        )
    else:
        assert failed.value == "it has been silent"
        assert f"{SILENCE_SECONDS * 1000:.0f}ms" in survivor.value
