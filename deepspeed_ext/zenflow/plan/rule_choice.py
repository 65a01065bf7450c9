"""Chooses between the exact and the predictive rule once steps have been measured. Pure functions.

Until then every step waits for its own update, so weights are the same under both rules, and so is
everything that a step leaves behind: p, the moments, and constants of the newest update. What else
overlapped steps need, y and block means of the coming update, the last synchronous step publishes.
The arena and the landing buffers are those of overlapped steps, which hold all that exact ones use.

The exact rule hides its chain of copies and pass behind what runs from a step to the next backward
pass, the predictive rule behind a whole step. Each is given the share on the accelerator that suits
it. Not known yet, and so not counted for either: by how much a pass delays what runs beside it, and
how long elements on the accelerator take there. Nor are gathers of stage 3 that are not prefetched
while weights arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.places import WeightsArrival
from deepspeed_ext.zenflow.plan.plan import Reason, ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.search import Measured, search_measured
from deepspeed_ext.zenflow.plan.share import step_seconds

__all__ = [
    "MOST_EXPOSED",
    "RuleChoice",
    "arrival_reason",
    "choose_rule",
    "rule_reason",
    "with_rule",
]

MOST_EXPOSED = 0.05
"""Fraction by which an exact step may be longer than a predictive one."""


@dataclass(frozen=True)
class RuleChoice:
    """The rule that a run follows from now on.

    Attributes:
        is_exact: whether it is the exact rule.
        why: the reason, with the numbers.
    """

    is_exact: bool
    why: str


def rule_reason(name: str, why: str) -> Reason:
    """The reason of a rule that the config left open."""
    return Reason(f"zenflow.update_rule = {name}", why, is_open=True)


def arrival_reason(arrives: WeightsArrival, why: str) -> Reason:
    """The reason why weights arrive when they do."""
    return Reason(f"weights arrive {arrives.value}", why)


def with_rule(plan: ZenFlowPlan, *, is_exact: bool, why: str) -> ZenFlowPlan:
    """`plan`, whose rule is open, with a rule; everything else stays in place."""
    assert isinstance(plan.rule, PredictiveSettings)
    reason = rule_reason("exact" if is_exact else "predictive", why)
    name, _, _ = reason.decision.partition(" = ")
    others = [each for each in plan.reasons if not each.decision.startswith(name)]
    arrive = plan.weights_arrive
    if arrive is WeightsArrival.IN_FORWARD and not is_exact:
        arrive = WeightsArrival.IN_STEP
        others = [
            each
            for each in others
            if each.decision != arrival_reason(plan.weights_arrive, "").decision
        ]
        others.append(arrival_reason(arrive, "the predictive rule was chosen"))
    return replace(
        plan,
        rule=replace(plan.rule, overlapped=not is_exact, is_open=False),
        weights_arrive=arrive,
        reasons=(reason, *others),
    )


def choose_rule(now: ZenFlowPlan, may_expose: bool, ranks: Sequence[Measured]) -> RuleChoice:
    """The exact rule if its best plan is nearly as fast as the best of the predictive rule.

    Args:
        now: the plan, whose rule is open.
        may_expose: see `search.ways_on`.
        ranks: what every rank has measured, in synchronous steps.
    """
    found = []
    for is_exact in (False, True):
        plan = with_rule(now, is_exact=is_exact, why="")
        found.append(search_measured(plan, may_expose, ranks))
    predictive, exact = found
    window = min(each.times.window for each in ranks)
    slowest = max((each.times for each in ranks), key=lambda times: times.worker)
    chain = step_seconds(exact.plan, exact.share, replace(slowest, device=0.0, window=0.0))
    arrives = now.weights_arrive is WeightsArrival.IN_FORWARD
    behind = (
        f"the {window * 1e3:.1f} ms from a step to the next backward pass"
        if arrives
        else "nothing, because weights arrive in the step"
    )
    why = (
        f"a step would take {exact.seconds * 1e3:.1f} ms with the exact rule, which hides a chain "
        f"of {chain * 1e3:.1f} ms behind {behind}, and {predictive.seconds * 1e3:.1f} ms with the "
        f"predictive rule; at most {MOST_EXPOSED:.0%} more is accepted"
    )
    return RuleChoice(exact.seconds <= (1.0 + MOST_EXPOSED) * predictive.seconds, why)
