"""An interval that is measured at the start trains as if the config had said it."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow import optimizer
from deepspeed_ext.zenflow.predictive import rule
from deepspeed_ext.zenflow.schedule import MEASURED_STEPS
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, masters_of, train, zenflow_config

pytestmark = pytest.mark.sampled(2)

STEPS = 20
PLENTY = 1 << 60


def follow(config: dict[str, Any], measured: int, slots: int | None = None) -> dict[str, Any]:
    """Train while measurement, if there is any, finds the interval `measured`, and rank 0 has room for `slots` more."""
    engine = make_engine(config)
    nbytes = sum(partition.ring[0].nbytes for partition in engine.optimizer.zenflow_adam.partitions)
    room = PLENTY if slots is None or dist.get_rank() else slots * nbytes * dist.get_world_size()
    with (
        patch.object(rule, "smallest_interval", lambda *_: measured),
        patch.object(optimizer, "available_host_bytes", lambda: room),
    ):
        losses = train(engine, batches(STEPS, 0))
    found = {
        "losses": losses,
        "masters": masters_of(engine),
        "interval": engine.optimizer.zenflow_adam.rule.schedule.interval,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("given", [{}, {"full_warm_up_rounds": 0}, {"full_warm_up_rounds": 3}])
@pytest.mark.parametrize("measured", [1, 2, 4])
def test_an_open_interval_is_the_same_run_as_a_given_one(stage: int, given: dict[str, int], measured: int) -> None:
    """Overlap begins once the worker has published ahead: one step after the measured ones, or after the warm-up."""
    warm_up = MEASURED_STEPS + 1 if given or measured == 1 else 5 * measured
    settled = {"update_interval": measured, "full_warm_up_rounds": max(warm_up, measured)}
    (open_run,) = run_ranks(1, follow, zenflow_config(stage, torch.bfloat16, **given), measured)
    (given_run,) = run_ranks(1, follow, zenflow_config(stage, torch.bfloat16, **settled), measured)
    assert open_run["interval"] == measured
    assert_same(open_run, given_run)


@pytest.mark.parametrize(("slots", "interval"), [(0, 1), (1, 1), (2, 2), (5, 3), (6, 4), (100, 4)])
def test_an_interval_that_host_memory_has_no_room_for_is_not_chosen(slots: int, interval: int) -> None:
    """On any rank: 2 S - 1 slots are needed, of which one is in use already."""
    found = run_ranks(2, follow, zenflow_config(2, torch.bfloat16), 4, slots)
    assert [each["interval"] for each in found] == [interval, interval]
