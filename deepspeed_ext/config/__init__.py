"""Defines what a user may write, and reads it."""

from deepspeed_ext.config.fields import (
    CoreBindingConfig,
    FlattenTier,
    ReservedCores,
    RuleName,
    ZenFlowConfig,
    ZeroFields,
    given_of_the_other_rule,
    idle_fields,
)

__all__ = [
    "CoreBindingConfig",
    "FlattenTier",
    "ReservedCores",
    "RuleName",
    "ZenFlowConfig",
    "ZeroFields",
    "given_of_the_other_rule",
    "idle_fields",
]
