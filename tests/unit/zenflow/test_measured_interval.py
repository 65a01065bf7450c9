"""An interval that is measured at the start trains as if the config had said it."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.zenflow.predictive import rule
from deepspeed_ext.zenflow.schedule import MEASURED_STEPS
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, masters_of, train, zenflow_config

pytestmark = pytest.mark.sampled(2)

STEPS = 20


def follow(config: dict[str, Any], measured: int) -> dict[str, Any]:
    """Train while measurement, if there is any, finds the interval `measured`."""
    with patch.object(rule, "smallest_interval", lambda *_: measured):
        engine = make_engine(config)
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
@pytest.mark.parametrize("measured", [1, 2, 5])
def test_an_open_interval_is_the_same_run_as_a_given_one(stage: int, given: dict[str, int], measured: int) -> None:
    """Overlap begins once the worker has published ahead: one step after the measured ones, or after the warm-up."""
    warm_up = MEASURED_STEPS + 1 if given or measured == 1 else 5 * measured
    settled = {"update_interval": measured, "full_warm_up_rounds": max(warm_up, measured)}
    (open_run,) = run_ranks(1, follow, zenflow_config(stage, torch.bfloat16, **given), measured)
    (given_run,) = run_ranks(1, follow, zenflow_config(stage, torch.bfloat16, **settled), measured)
    assert open_run["interval"] == measured
    assert_same(open_run, given_run)
