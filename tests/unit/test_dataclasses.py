"""Plans, facts and settings cannot change after they were made: what the ranks have compared stays
what it was."""

from __future__ import annotations

import ast

from tests.support.paths import ROOT

PACKAGE = ROOT / "deepspeed_ext"
PLANNERS = ("commands/memory", "config", "cores", "flatten", "gather", "runtime", "zenflow/plan")
SCHEDULES = ("schedule.py", "guard.py")
FILLED_IN = {"gather/launch.py:PendingParameter"}
"""What changes while something runs."""


def test_what_planners_and_schedules_make_is_frozen() -> None:
    paths = [path for folder in PLANNERS for path in (PACKAGE / folder).rglob("*.py")]
    paths += [path for path in (PACKAGE / "zenflow").rglob("*.py") if path.name in SCHEDULES]
    found = {
        f"{path.relative_to(PACKAGE)}:{node.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "frozen=True" not in decorator
    }
    assert found == FILLED_IN
