"""Finds the classes of a plan's update rule, and of what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import PredictiveSettings, RuleSettings, SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive import PredictiveRule, PredictiveState
from deepspeed_ext.zenflow.rules.saved import (
    PartitionValues,
    PredictivePartitionValues,
    SelectivePartitionValues,
)
from deepspeed_ext.zenflow.rules.selective import SelectiveRule, SelectiveState
from deepspeed_ext.zenflow.step.schedule import State

__all__ = ["SAVED", "rule_of"]

SAVED: Mapping[str, tuple[type[State], type[PartitionValues]]] = {
    PredictiveRule.name: (PredictiveState, PredictivePartitionValues),
    SelectiveRule.name: (SelectiveState, SelectivePartitionValues),
}
"""What a checkpoint holds by rule: the state of the schedule, and of each partition."""


_RULES: Mapping[type[RuleSettings], type[SelectiveRule] | type[PredictiveRule]] = {
    PredictiveSettings: PredictiveRule,
    SelectiveSettings: SelectiveRule,
}


def rule_of(plan: ZenFlowPlan) -> type[SelectiveRule] | type[PredictiveRule]:
    """The class of the plan's update rule."""
    return _RULES[type(plan.rule)]
