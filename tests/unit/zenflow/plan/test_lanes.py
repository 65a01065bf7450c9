"""What a step waits for its optimizer, against a model that walks through every chunk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.chunks import MOST_CHUNKS
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.times import Lanes, lanes_of, traffic_of
from tests.support.schedules import Machine, exact

NUMEL, GIB = 1 << 31, 1 << 30
PASSES, LINKS = (0.1, 0.2, 0.4, 0.8, 2.0), (0.05, 0.2, 0.5, 1.0)
FORWARDS = (0.1, 0.25, 1 / 3)
CHUNKS = 1 / MOST_CHUNKS


def plan_of(**config: Any) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True, partitions_weights=True)
    rank = RankFacts((Run(NUMEL),), 80 * GIB, 80 * GIB)
    chosen = ZenFlowConfig(**config)
    return decide(ZenFlowFacts((rank,), caller), chosen, ratio=1.0)


def lanes(plan: ZenFlowPlan, link: float, worker: float) -> Lanes:
    """On a machine that copies in `link` seconds each way and passes in `worker`."""
    moves = traffic_of(plan)
    return lanes_of(plan, moves.down * NUMEL / link, moves.passed * NUMEL / worker)


def peek_of(plan: ZenFlowPlan, worker: float) -> float:
    moves = traffic_of(plan)
    return worker * moves.peeked / moves.passed


@pytest.mark.parametrize(
    ("rule", "leaves"), [("exact", True), ("exact", False), ("predictive", True)]
)
@pytest.mark.parametrize("forward", FORWARDS)
def test_weights_that_come_up_in_chunks_wait_as_long_as_a_walk_through_them_says(
    forward: float, rule: str, leaves: bool
) -> None:
    plan = plan_of(update_rule=rule, gradients_on_host=leaves)
    assert plan.wait is Wait.FORWARD
    for link, worker in itertools.product(LINKS, PASSES):
        found, peek = lanes(plan, link, worker), peek_of(plan, worker)
        if plan.predicts_in_chunks:  # which reads the gradient and y, and writes weights
            peek = worker * 6 / traffic_of(plan).passed
        machine = Machine(forward, 1 - forward, link, worker, MOST_CHUNKS)
        walked = exact(machine, peek, arrives_in_backward=leaves)
        assert found.waits(forward, 1 - forward) == pytest.approx(walked, abs=0.03 * (1 + walked))


def test_a_peek_moves_16_bytes_and_fewer_with_smaller_moments() -> None:
    for state, moved in (("float32", 16), ("bfloat16", 12), ("int8", 10.06)):
        plan = plan_of(update_rule="exact", state_dtype=state)
        assert traffic_of(plan).peeked == pytest.approx(moved, abs=0.01)


def test_only_estimates_need_block_means() -> None:
    ups = {rule: traffic_of(plan_of(update_rule=rule)).up for rule in ("predictive", "exact")}
    assert ups == {"predictive": 2 + 4 / 32, "exact": 2}


def test_without_waits_only_the_first_chunk_is_exposed() -> None:
    plan = plan_of(update_rule="exact", gradients_on_host=True)
    found = lanes(plan, 0.1, 0.2)
    first = (peek_of(plan, 0.2) + found.up) * CHUNKS
    assert found.waits(1 / 3, 2 / 3) == pytest.approx(first) == pytest.approx(found.exposed)
