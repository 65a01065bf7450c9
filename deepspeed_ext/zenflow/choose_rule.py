"""Finds the classes of a plan's update rule, and of what a checkpoint holds of it."""

from __future__ import annotations

from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive.rule import PredictiveRule
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule

__all__ = ["rule_of"]


def rule_of(plan: ZenFlowPlan) -> type[SelectiveRule] | type[PredictiveRule]:
    """The class of the plan's update rule."""
    return SelectiveRule if isinstance(plan.rule, SelectiveSettings) else PredictiveRule
