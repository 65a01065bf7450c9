"""Ranks share a device if there are fewer; DeepSpeed names the missing ones by number, by text and
as torch.device."""

from __future__ import annotations

import pytest
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, train, zenflow_config


def losses(stage: int) -> tuple[int, list[float]]:
    engine = make_engine(zenflow_config(stage))
    found = train(engine, batches(4, dist.get_rank()))
    engine.destroy()
    return get_accelerator().device_count(), found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_share_a_device_train_as_with_one_each(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # New processes on both sides: in used ones, earlier
    # tests may have left settings of torch behind.
    apart = run_ranks(2, losses, stage, device="sim", pool="a device each")
    monkeypatch.setenv("SIMULATED_DEVICES", "1")
    shared = run_ranks(2, losses, stage, device="sim", pool="one device")
    assert [count for count, _ in apart] == [2, 2]
    assert [count for count, _ in shared] == [1, 1]
    assert_same([found for _, found in apart], [found for _, found in shared])
