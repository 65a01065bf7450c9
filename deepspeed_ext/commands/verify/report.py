"""Writes the report of a check, for people and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deepspeed_ext.commands.verify.checks import Check
from deepspeed_ext.commands.verify.config import Plan
from deepspeed_ext.runtime.words import counted

__all__ = ["as_json", "as_text", "passed"]


def passed(checks: Sequence[Check]) -> bool:
    """Whether no check failed; a skipped check and one that warns count as not failed."""
    return all(check.status != "FAIL" for check in checks)


def as_json(
    path: str,
    plan: Plan,
    device: str,
    checks: Sequence[Check],
    output: str,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Return the report as ``deepspeed-ext verify --json`` prints it."""
    return {
        "config": path,
        "summary": plan.summary,
        "upstream": plan.upstream,
        "device": device,
        "ranks": plan.ranks,
        "steps": plan.steps,
        "changes": list(plan.changes),
        "checks": [_finite(asdict(check)) for check in checks],
        "passed": passed(checks),
        "warnings": list(warnings),
        "output": output,
    }


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(
    path: str,
    plan: Plan,
    device: str,
    checks: Sequence[Check],
    output: str,
    warnings: Sequence[str],
) -> str:
    """Describe the report: the run, the differences from the config, a line per check, the run's
    warnings, and the output of a failed rank."""
    lines = [
        f"{path}: {plan.summary}",
        f"{counted(plan.ranks, 'rank')} on {device}, {counted(plan.steps, 'step')}",
    ]
    lines += [f"  changed for the check: {change}" for change in plan.changes]
    width = max(len(check.name) for check in checks)
    lines += [f"{check.status:<7}  {check.name:<{width}}  {check.detail}" for check in checks]
    lines += [f"warning: {warning}" for warning in warnings]
    if output:
        lines += [
            "output of a failed rank:",
            *(f"  | {line}" for line in output.splitlines()),
        ]
    failed = sum(check.status == "FAIL" for check in checks)
    lines.append("nothing failed" if not failed else f"{failed} of {len(checks)} checks failed")
    warned = len(warnings) + sum(check.status == "WARN" for check in checks)
    if warned:
        lines[-1] += f", {counted(warned, 'warning')}"
    return "\n".join(lines)
