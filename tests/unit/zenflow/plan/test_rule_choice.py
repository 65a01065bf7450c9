"""The choice between the exact and the predictive rule, as pure functions of what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Place, WeightsArrival
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.printed import as_config
from deepspeed_ext.zenflow.plan.rule_choice import MOST_EXPOSED, choose_rule, with_rule
from deepspeed_ext.zenflow.plan.search import Measured
from deepspeed_ext.zenflow.plan.share import UNITS, ChainTimes, step_seconds

GIB = 1 << 30
IN_STEP, IN_FORWARD = WeightsArrival.IN_STEP, WeightsArrival.IN_FORWARD
CHOSEN = ("zenflow.update_rule", "weights arrive")


def plan_of(*, stage: int = 3, is_on_cpu: bool = False, **section: Any) -> ZenFlowPlan:
    caller = Caller("bfloat16", "bfloat16", takes_gradients=True, partitions_weights=stage == 3)
    rank = RankFacts((Run(GIB),), 80 * GIB, 80 * GIB)
    facts = ZenFlowFacts((rank,), caller, is_on_cpu=is_on_cpu)
    return decide(facts, ZenFlowConfig(**{"update_rule": "auto"} | section))


def rank_of(times: ChainTimes, room: float = 0.0) -> Measured:
    """A rank whose accelerator has room for the fraction `room` of its optimizer."""
    least = round((1.0 - room) * UNITS)
    return Measured(times, (least, least))


STEP = ChainTimes(device=1.0, worker=0.4, window=0.3)


@pytest.mark.parametrize(
    ("ranks", "is_exact"),
    [
        ([rank_of(replace(STEP, worker=0.34))], True),
        ([rank_of(replace(STEP, worker=0.36))], False),
        ([rank_of(STEP)], False),
        ([rank_of(STEP, room=0.2)], True),  # the rest hides
        ([rank_of(replace(STEP, link=0.5, worker=0.1))], False),
        ([rank_of(replace(STEP, worker=0.3, fixed=0.1))], False),
        ([rank_of(replace(STEP, worker=0.3)), rank_of(STEP)], False),
        ([rank_of(STEP, room=0.2), rank_of(STEP, room=0.13)], True),  # 5 % is accepted
        ([rank_of(STEP, room=0.2), rank_of(STEP, room=0.11)], False),
        (
            [rank_of(replace(STEP, worker=0.2, window=each)) for each in (0.3, 0.1)],
            False,
        ),
        # both rules wait for a worker that is far too slow
        ([rank_of(replace(STEP, worker=20.0))], True),
    ],
)
def test_the_exact_rule_is_taken_if_it_is_nearly_as_fast_on_every_rank(
    ranks: list[Measured], is_exact: bool
) -> None:
    choice = choose_rule(plan_of(), True, ranks)
    assert choice.is_exact is is_exact, choice.why
    assert choose_rule(plan_of(), True, ranks[::-1]) == choice
    assert f"at most {MOST_EXPOSED:.0%} more is accepted" in choice.why


@pytest.mark.parametrize(
    ("section", "is_exact", "why"),
    [
        (
            {},
            False,
            "1200.0 ms with the exact rule, which hides a chain of 200.0 ms behind nothing",
        ),
        (
            {"weights_arrive_in_forward": True},
            True,
            "1000.0 ms with the exact rule, which hides a chain of 200.0 ms behind the 300.0 ms",
        ),
    ],
)
def test_at_stages_1_and_2_nothing_hides_unless_the_config_lets_weights_arrive_in_the_forward(
    section: dict[str, Any], is_exact: bool, why: str
) -> None:
    plan, ranks = plan_of(stage=2, **section), [rank_of(replace(STEP, worker=0.2))]
    choice = choose_rule(plan, True, ranks)
    assert choice.is_exact is is_exact
    assert ("because weights arrive in the step" in choice.why) is not is_exact
    assert choice.why.startswith(f"a step would take {why}")
    assert "and 1000.0 ms with the predictive rule" in choice.why
    short = [rank_of(replace(STEP, worker=0.04))]
    assert choose_rule(plan, True, short).is_exact


def test_weights_follow_a_step_once_the_rule_is_the_exact_one() -> None:
    plan = plan_of()
    assert plan.rule.is_open
    assert not plan.weights_follow
    assert with_rule(plan, is_exact=True, why="").weights_follow
    assert not with_rule(plan, is_exact=False, why="").weights_follow
    assert not plan_of(stage=2, overlap_step=False).weights_follow


def test_while_copies_run_inside_the_step_only_the_pass_hides() -> None:
    plan = with_rule(plan_of(hide_transfers=False), is_exact=True, why="")
    assert step_seconds(plan, 1.0, replace(STEP, link=0.2)) == pytest.approx(1.0 + 0.2 + 0.1)


@pytest.mark.parametrize(
    ("how", "expected", "why"),
    [
        ({}, None, "8 are measured"),
        ({"stage": 2}, None, "8 are measured"),
        ({"gradients_on_host": True}, None, "8 are measured"),
        ({"is_on_cpu": True}, "predictive", "the CPU is the accelerator"),
        ({"autotune": False}, "predictive", "autotune is off"),
        ({"update_interval": 2}, "predictive", "no update_interval"),
        ({"update_interval": "measured"}, "predictive", "no update_interval"),
        ({"overlap_step": False}, "exact", "overlap_step is off"),
    ],
)
def test_the_rule_is_open_at_the_start_where_it_can_be_measured(
    how: dict[str, Any], expected: str | None, why: str
) -> None:
    plan = plan_of(**how)
    assert plan.rule.is_open is (expected is None)
    assert plan.reasons[0].decision == f"zenflow.update_rule = {expected or 'measured'}"
    assert why in plan.reasons[0].why
    late = expected is None and how.get("stage", 3) == 3
    assert plan.weights_arrive is (IN_FORWARD if late else IN_STEP)
    assert (plan.rule.overlapped and not plan.rule.is_open) is (expected == "predictive")


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("section", [{}, {"gradients_on_host": True}], ids=str)
def test_a_chosen_rule_is_the_plan_of_a_config_that_names_it(
    section: dict[str, Any], is_exact: bool
) -> None:
    before = plan_of(**section)
    chosen = with_rule(before, is_exact=is_exact, why="")
    assert not chosen.rule.is_open
    others = {each for each in before.reasons if not each.decision.startswith(CHOSEN)}
    assert len(others) > 1
    assert others <= set(chosen.reasons)
    arrives = [each for each in chosen.reasons if each.decision.startswith("weights arrive")]
    assert [each.decision for each in arrives] == [f"weights arrive {chosen.weights_arrive.value}"]
    named = plan_of(**section | as_config(chosen)["zenflow"])
    laid_out = replace(cast(PredictiveSettings, named.rule), exchanges_per_block=True)  # as before
    assert replace(named, rule=laid_out, reasons=chosen.reasons) == chosen
    assert chosen.places.weights is Place.ACCELERATOR


def test_other_rules_are_not_open() -> None:
    for rule in ("predictive", "exact", "selective", None):
        assert not plan_of(update_rule=rule).rule.is_open
