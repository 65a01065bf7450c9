"""A rank that dies or falls silent during a gather ends the others with an error, within the group's timeout."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.support.models import batches
from tests.support.ranks import run_fresh_ranks
from tests.unit.test_gather_features import OURS, engine_for

GROUP_TIMEOUT_SECONDS = 5.0


class FailingGather:
    """Stands in front of the gather of one rank; at the third fetch the rank dies, or sleeps past the timeout."""

    def __init__(self, gather: Any, dies: bool) -> None:
        self.gather, self.dies, self.calls = gather, dies, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3 and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3:
            time.sleep(2 * GROUP_TIMEOUT_SECONDS)
        return self.gather(*args, **kwargs)


def train(engine: Any) -> None:
    for batch in batches(3, 0):
        engine.backward(engine(batch))
        engine.step()


def body(dies: bool, min_numel: int) -> float:
    engine = engine_for(OURS | {"stage3_single_param_min_numel": min_numel})
    if torch.distributed.get_rank() == 1:
        failing = FailingGather(engine.parameter_gather, dies)
        for parameter in engine.module.parameters():
            parameter.all_gather_coalesced = failing
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        train(engine)
    return time.monotonic() - start


@pytest.mark.parametrize(("dies", "min_numel"), [(True, 0), (False, 10_000)], ids=["killed", "silent"])
def test_the_other_rank_ends_with_an_error(dies: bool, min_numel: int) -> None:
    survivor, failed = run_fresh_ranks(
        2, body, dies, min_numel, timeout_seconds=60, group_timeout_seconds=GROUP_TIMEOUT_SECONDS
    )
    assert survivor.error is None
    assert survivor.value < 2 * GROUP_TIMEOUT_SECONDS
    if dies:
        assert failed.exit_code == -signal.SIGKILL
