"""Defines what a user may write under ``zero_optimization``, with one model per system, and reads a
config file."""

from deepspeed_ext.config.section import ReservedCores
from deepspeed_ext.config.zenflow import RuleName, ZenFlowConfig, given_of_the_other_rule
from deepspeed_ext.config.zero import CoreBindingConfig, FlattenTier, ZeroFields

__all__ = [
    "CoreBindingConfig",
    "FlattenTier",
    "ReservedCores",
    "RuleName",
    "ZenFlowConfig",
    "ZeroFields",
    "given_of_the_other_rule",
]
