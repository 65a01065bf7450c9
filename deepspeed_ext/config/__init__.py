"""Defines what a user may write under ``zero_optimization``, with one model per system, and reads a
config file."""

from deepspeed_ext.config.fields import (
    CoreBindingConfig,
    FlattenTier,
    ReservedCores,
    RuleName,
    ZenFlowConfig,
    ZeroFields,
    given_of_the_other_rule,
)

__all__ = [
    "CoreBindingConfig",
    "FlattenTier",
    "ReservedCores",
    "RuleName",
    "ZenFlowConfig",
    "ZeroFields",
    "given_of_the_other_rule",
]
