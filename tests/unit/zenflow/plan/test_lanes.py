"""What a step waits for its optimizer, against a model that walks through every chunk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.chunks import MOST_CHUNKS
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.lanes import Lanes, Speeds, lanes_of, traffic_of
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from tests.support.schedules import (
    Machine,
    during_backward,
    exact,
    predictive,
    speculative,
    zero_offload,
)

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
    return lanes_of(plan, Speeds(moves.down * NUMEL / link, moves.passed * NUMEL / worker))


def peek_of(plan: ZenFlowPlan, worker: float) -> float:
    moves = traffic_of(plan)
    return worker * moves.peeked / moves.passed


@pytest.mark.parametrize("leaves", [True, False], ids=["in backward", "after it"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_the_exact_rule_waits_as_long_as_a_walk_through_its_chunks_says(
    forward: float, leaves: bool
) -> None:
    plan = plan_of(update_rule="exact", gradients_on_host=leaves)
    for link, worker in itertools.product(LINKS, PASSES):
        found, peek = lanes(plan, link, worker), peek_of(plan, worker)
        machine = Machine(forward, 1 - forward, link, worker, MOST_CHUNKS)
        walked = exact(machine, peek, arrives_in_backward=leaves)
        assert found.waits(forward, 1 - forward) == pytest.approx(walked, abs=0.03 * (1 + walked))


def test_a_peek_moves_16_bytes_and_fewer_with_smaller_moments() -> None:
    """And the copy up reads what it has written: 2 more."""
    for state, moved in (("float32", 16), ("bfloat16", 12), ("int8", 10.06)):
        plan = plan_of(update_rule="exact", state_dtype=state)
        assert traffic_of(plan).peeked == pytest.approx(moved + 2, abs=0.01)


@pytest.mark.parametrize("forward", FORWARDS)
def test_without_a_norm_it_would_wait_for_what_backward_leaves(forward: float) -> None:
    """The formula of the lab's page on the exact rule, where the pass is the slowest lane."""
    for worker in PASSES:
        machine = Machine(forward, 1 - forward, 0.15 * worker, worker, MOST_CHUNKS)
        left, pace = max(0.0, worker - machine.backward), max(0.0, 1 - forward / worker)
        said = 1.3 * worker * CHUNKS + left * pace
        assert during_backward(machine) == pytest.approx(said, abs=0.02)


def test_only_estimates_need_block_means() -> None:
    ups = {rule: traffic_of(plan_of(update_rule=rule)).up for rule in ("predictive", "exact")}
    assert ups == {"predictive": 2 + 4 / 32, "exact": 2}


def test_without_waits_only_the_first_chunk_is_exposed() -> None:
    plan = plan_of(update_rule="exact", gradients_on_host=True)
    found = lanes(plan, 0.1, 0.2)
    first = (peek_of(plan, 0.2) + found.up) * CHUNKS
    assert found.waits(1 / 3, 2 / 3) == pytest.approx(first) == pytest.approx(found.exposed)


def test_schedules_wait_as_long_as_their_slowest_lane_says() -> None:
    """The bounds of each schedule, which need no walk."""
    machine = Machine(0.25, 0.75, 0.1, 0.5, MOST_CHUNKS)
    assert predictive(machine) == 0.0
    assert zero_offload(machine) == pytest.approx(0.6 + 0.2 * CHUNKS, abs=1e-9)
    hidden = speculative(machine)
    assert hidden == pytest.approx((0.5 + 2 * 0.2) * CHUNKS, abs=1e-9)
    slow = Machine(0.25, 0.75, 0.1, 1.0, MOST_CHUNKS)
    assert speculative(slow) > speculative(slow, kept=0.3) >= 0.0
    costs = [speculative(machine, clipped=part) for part in (0.0, 0.5, 1.0)]
    assert costs[1] - costs[0] == pytest.approx(costs[2] - costs[1])
    assert costs[2] - costs[0] == pytest.approx(2 * 0.5, abs=3 * CHUNKS)
