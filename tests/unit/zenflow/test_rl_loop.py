"""A loop like GRPO's that sleeps while it generates: losses and weights are those of one that does
not."""

from __future__ import annotations

import pytest

from tests.support import rl_loop
from tests.support.matrix import some
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, zenflow_config

pytestmark = pytest.mark.sampled(4)

ITERATIONS = 10


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("stage", "rule"), some([(stage, rule) for stage in (1, 2, 3) for rule in RULES])
)
def test_losses_and_the_generators_weights_are_those_of_a_loop_that_stays_awake(
    stage: int, rule: str
) -> None:
    config = zenflow_config(stage, accumulation=2, **RULES[rule])
    for changed, losses in run_ranks(2, rl_loop.both_loops, config, ITERATIONS, remote=False):
        assert changed >= 5  # of the names, all but the frozen one
        assert len(set(losses)) > ITERATIONS


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_with_the_generator_in_another_process(stage: int) -> None:
    config = zenflow_config(stage, accumulation=2)
    for changed, _ in run_ranks(2, rl_loop.both_loops, config, ITERATIONS, remote=True):
        assert changed >= 5
