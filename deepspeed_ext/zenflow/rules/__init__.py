"""The update rules: when a step hands gradients over, and how it computes weights from results."""

from __future__ import annotations

from deepspeed_ext.zenflow.rules.predictive import PredictiveRule
from deepspeed_ext.zenflow.rules.selective import SelectiveRule

RULES: dict[str, type[PredictiveRule] | type[SelectiveRule]] = {
    "predictive": PredictiveRule,
    "selective": SelectiveRule,
}
"""By the name of a rule's settings (`RuleSettings.name`), which is that in checkpoints."""
