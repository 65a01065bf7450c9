"""Copies that run when a test says, where the planner would decide: ``hide_transfers`` in a
section, which is a field of earlier releases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan import decide as planner
from deepspeed_ext.zenflow.plan.facts import ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["copies_as", "decided"]


@contextmanager
def copies_as(section: dict[str, Any]) -> Iterator[None]:
    """Inside, a plan of the ``zenflow`` section has copies as the field says, which is taken
    out."""
    hides = section.pop("hide_transfers", None)
    if hides is False:
        section.setdefault("gradients_on_host", False)
    least = {True: -1e3, False: 1e3}.get(hides, planner.LEAST_FREE)
    with patch.object(planner, "LEAST_FREE", least):
        yield


def decided(facts: ZenFlowFacts, section: dict[str, Any], **how: Any) -> ZenFlowPlan:
    """The plan of `section`, with copies as its field says."""
    section, hides = dict(section), section.get("hide_transfers")
    with copies_as(section):
        facts = facts if hides is not False else replace(facts, refuses_landing=True)
        return planner.decide(facts, ZenFlowConfig(**section), **how)
