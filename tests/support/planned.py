"""Copies that run when a test says, where the planner would decide: ``hide_transfers`` in a
section, which is a field of earlier releases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow import start
from deepspeed_ext.zenflow.plan import decide as planner
from deepspeed_ext.zenflow.plan.facts import ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["copies_as", "decided"]

FIELD = "hide_transfers"
ROOMY = -100.0
"""A fraction of the accelerator that stays free, so that landing buffers always fit."""


def _taken(section: dict[str, Any]) -> bool | None:
    """Take the field out of a section: whether copies run beside the step; None: not said."""
    hides: bool | None = section.pop(FIELD, None)
    if hides is False:
        section.setdefault("gradients_on_host", False)
    return hides


@contextmanager
def copies_as(config: dict[str, Any]) -> Iterator[None]:
    """Inside, an engine of `config` plans its copies as the field says, which is taken out."""
    hides = _taken(config.get("zero_optimization", {}).get("zenflow") or {})
    facts = start.facts_of_all
    if hides is None:
        yield
    elif hides:
        with patch.object(planner, "LEAST_FREE", ROOMY):
            yield
    else:
        with patch.object(
            start, "facts_of_all", lambda *how: replace(facts(*how), refuses_landing=True)
        ):
            yield


def decided(facts: ZenFlowFacts, section: dict[str, Any], **how: Any) -> ZenFlowPlan:
    """The plan of `section`, with copies as its field says."""
    section = dict(section)
    hides = _taken(section)
    facts = replace(facts, refuses_landing=facts.refuses_landing or hides is False)
    least = ROOMY if hides else planner.LEAST_FREE
    with patch.object(planner, "LEAST_FREE", least):
        return planner.decide(facts, ZenFlowConfig(**section), **how)
