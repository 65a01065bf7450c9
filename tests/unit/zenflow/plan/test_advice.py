"""What limits a measured step and what would help, by table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.advice import (
    Cores,
    Limit,
    MeasuredStep,
    Remedy,
    advise,
    remedies_of,
)
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from tests.support.planned import decided

GIB = 1 << 30
SHARE = 'offload_optimizer.ratio "auto"'
ROUNDED = Remedy("state_dtype bfloat16", "but rounds", worker=20 / 28)
FEWER = Remedy("state_dtype int8", "but rounds more", worker=15 / 28)
ALL = (ROUNDED, FEWER)


def step(device: float, inside: float, wait: float, worker: float, **rest: float) -> MeasuredStep:
    return MeasuredStep(device, inside, wait, worker, **rest)


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        (step(1.00, 0.04, 0.03, 1.00), Limit.NOTHING),
        (step(1.00, 0.30, 0.28, 1.27), Limit.WORKER),
        (step(1.00, 0.30, 0.28, 1.27, link=0.9), Limit.WORKER),
        (step(1.00, 0.30, 0.28, 0.60, link=1.27), Limit.LINK),
        (step(1.00, 0.30, 0.28, 0.60), Limit.LINK),
        (step(1.00, 0.30, 0.10, 1.00, gather=0.18), Limit.GATHER),
        (step(1.00, 0.30, 0.10, 1.00, gather=0.02), Limit.STEP),
        (step(1.00, 0.30, 0.29, 1.20), Limit.WORKER),
        (step(1.00, 0.30, 0.29, 1.10), Limit.LINK),
    ],
)
def test_the_largest_part_of_the_step_limits_it(measured: MeasuredStep, limit: Limit) -> None:
    assert advise(measured).limit is limit


def test_a_slowdown_is_a_ratio_of_times() -> None:
    assert step(2.0, 1.0, 0.5, 1.0).slowdown == 1.5


@pytest.mark.parametrize(
    ("measured", "cores", "room", "line"),
    [
        (
            step(1.00, 0.02, 0.0, 0.5),
            Cores(14, 16),
            0,
            "ZenFlow: a step takes 1.02x its time without the optimizer; nothing limits it.",
        ),
        (
            step(1.00, 0.08, 0.08, 1.08),
            Cores(14, 16),
            0,
            "ZenFlow: a step takes 1.08x its time without the optimizer; "
            "the optimizer process limits it (14 of "
            "16 cores). state_dtype bfloat16 would make it 1.00x, but rounds.",
        ),
        (
            step(1.00, 0.70, 0.68, 1.66, link=0.5),
            Cores(8, 16),
            0,
            "ZenFlow: a step takes 1.70x its time without the optimizer; "
            "the optimizer process limits it (8 of 16 cores). "
            "pt_reserved_cores 2 would give it 14. "
            "state_dtype int8 would make it 1.02x, but rounds more.",
        ),
        (
            step(1.00, 0.30, 0.28, 0.60),
            None,
            2 * GIB,
            "ZenFlow: a step takes 1.30x its time without the optimizer; "
            "the link to the host limits it.",
        ),
        (
            step(1.00, 0.30, 0.02, 0.60, gather=0.2),
            None,
            4 * GIB,
            "ZenFlow: a step takes 1.30x its time without the optimizer; "
            "the gather of the weights limits it.",
        ),
    ],
)
def test_a_line_says_what_limits_what_helps_and_what_it_costs(
    measured: MeasuredStep, cores: Cores | None, room: int, line: str
) -> None:
    advice = advise(measured, ALL, cores, room)
    assert advice.line == line
    assert (advice.helped is not None) == ("would make it" in line)


def test_copies_that_stay_inside_the_step_are_still_waited_for() -> None:
    """The copies take 0.1 of the wait, so a shorter pass leaves 1.12."""
    measured = step(1.0, 0.32, 0.30, 1.22)
    assert measured.exposed_copies == pytest.approx(0.1)
    assert advise(measured, [ROUNDED]).helped == pytest.approx(1.12)


seconds = st.floats(0.0, 10.0)


@given(st.floats(0.01, 10.0), seconds, st.floats(0.0, 1.0), seconds, seconds, st.floats(0.0, 1.0))
def test_no_remedy_promises_more_than_the_accelerators_own_time_allows(
    device: float, inside: float, waits: float, worker: float, link: float, gathers: float
) -> None:
    wait = inside * waits
    measured = step(device, inside, wait, worker, link=link, gather=(inside - wait) * gathers)
    advice = advise(measured, ALL, room=4 * GIB)
    if advice.helped is not None:
        assert measured.busy / device - 1e-9 <= advice.helped < advice.slowdown


# -- what can be changed about a plan --------------------------------------------------------------


def plan_of(*, host_share: float | None = 1.0, lion: bool = False, **config: object) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True)
    layout = {"layout": LION_STATE} if lion else {}
    facts = ZenFlowFacts((RankFacts((Run(GIB),), 80 * GIB, 80 * GIB),), caller, **layout)
    return decided(facts, config, host_share=host_share)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (plan_of(), [SHARE, "state_dtype bfloat16"]),
        (plan_of(state_dtype="bfloat16"), [SHARE]),
        (plan_of(state_dtype="int8"), [SHARE]),
        (plan_of(host_share=0.5), ["state_dtype bfloat16"]),
        (plan_of(host_share=None), ["state_dtype bfloat16"]),
        (plan_of(gradients_on_host=True), ["state_dtype bfloat16"]),
        (plan_of(hide_transfers=False), [SHARE, "state_dtype bfloat16"]),
        (plan_of(overlap_step=False), []),
        (plan_of(lion=True), []),
        (plan_of(topk_ratio=0.1), []),
    ],
)
def test_only_what_a_run_allows_is_suggested(plan: ZenFlowPlan, changes: list[str]) -> None:
    assert list(dict.fromkeys(each.change for each in remedies_of(plan))) == changes


def test_the_smallest_share_that_helps_enough_is_suggested_if_there_is_room() -> None:
    """Half of the optimizer takes 12 bytes for each of its parameters, and frees 2.1 of
    landing."""
    measured, remedies = step(1.0, 0.70, 0.68, 1.66, link=0.5), remedies_of(plan_of())
    said = advise(measured, remedies, room=16 * GIB).line
    assert 'offload_optimizer.ratio "auto" would make it 1.04x, and takes 3.8 GiB' not in said
    assert 'offload_optimizer.ratio "auto" would make it 1.02x, and takes 4.9 GiB' in said
    assert "state_dtype bfloat16" in advise(measured, remedies, room=2 * GIB).line


def test_remedies_are_worth_what_they_move() -> None:
    by_change = {each.change: each for each in remedies_of(plan_of(hide_transfers=False))}
    assert by_change["state_dtype bfloat16"].worker == pytest.approx(20 / 28, abs=0.01)
