"""Writes a plan as the config that reproduces it."""

from __future__ import annotations

from typing import Any

from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings

__all__ = ["as_config"]


def as_config(plan: ZenFlowPlan) -> dict[str, Any]:
    """The ``zero_optimization`` fields that fix what `plan` chose; plain values. With the other
    fields of the run's config they give the same plan on any machine that has room."""
    rule, places = plan.rule, plan.places
    section: dict[str, Any] = {"autotune": False}
    if isinstance(rule, PredictiveSettings):
        section["update_rule"] = "predictive" if rule.overlapped else "exact"
        if rule.warm_up_steps is not None:
            section["full_warm_up_rounds"] = rule.warm_up_steps
    if places.weights is Place.ACCELERATOR:
        section["gradients_on_host"] = places.gradient is Place.HOST
    found: dict[str, Any] = {"zenflow": section}
    if places.weights is Place.ACCELERATOR:
        found["offload_optimizer"] = {"device": "cpu", "ratio": plan.host_share}
    if plan.cpus is not None:
        found["core_binding"] = {"optimizer_cores": plan.cpus.threads}
    return found
