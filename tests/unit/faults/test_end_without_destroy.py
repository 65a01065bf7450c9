"""A script may end without ``engine.destroy()``, as most do: its exit status is 0, also while exact
weights are on their way. The interpreter's end frees the weights when it destroys the engine."""

from __future__ import annotations

import os
import sys

import deepspeed
import pytest

import deepspeed_ext
from tests.support.forked import run_forked
from tests.support.models import OddModel, batches
from tests.support.zenflow import train as steps
from tests.support.zenflow import zenflow_config


def train(stage: int, rule: str) -> None:
    deepspeed_ext.enable()
    config = zenflow_config(stage, update_rule=rule)
    engine, *_ = deepspeed.initialize(model=OddModel(), config=config)
    steps(engine, batches(3, 0))
    sys.stdout.write("trained\n")


@pytest.mark.parametrize(
    ("stage", "rule"), [pytest.param(2, "predictive", marks=pytest.mark.full), (3, "exact")]
)
def test_a_script_that_ends_after_a_step_ends_well(stage: int, rule: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    done = run_forked(__name__, str(stage), rule, environment=environment)
    assert "trained" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
