"""Writes `adapter/contract.json`: what our sources use of DeepSpeed, in the form that the installed
DeepSpeed gives it.

    python -m tests.support.contract

Members of our subclasses, of objects that hold an optimizer of DeepSpeed's, and attributes of
parameters are found in our sources; other members are kept as the file has them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_ext.adapter import upstream
from deepspeed_ext.adapter.upstream import ASSIGNED, EXISTS, PAGE, undecorated
from tests.support.assigned import assigned_by

ADAPTER = PAGE.parent
PACKAGE = ADAPTER.parent
STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
HOLDERS = {
    "Load": (ENGINE, ("self._engine", "engine")),
    "GroupPartitions": (STAGES_1_AND_2, ("self._zero", "zero")),
    "SubGroupPartitions": (STAGE_3, ("self._zero", "zero")),
}
"""Our classes that hold an engine or an optimizer of DeepSpeed's: which, and their names for it."""
OF_TORCH = {"module"}

Pairs = Iterator[tuple[str, str]]


def attributes_of(node: ast.AST, *names: str) -> set[str]:
    """X of ``name.X`` and ``name().X`` for each of `names`, which may be dotted."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            target = inner.value.func if isinstance(inner.value, ast.Call) else inner.value
            if ast.unparse(target) in names:
                found.add(inner.attr)
    return found


def of_subclass(kind: type, nodes: dict[type, ast.ClassDef]) -> Pairs:
    """What the classes that `kind` is made of define, read, call or assign of DeepSpeed's."""
    parts = [part for part in kind.__mro__ if part in nodes]
    theirs = [part for part in kind.__mro__ if part.__module__.startswith("deepspeed.")]
    for part in parts if theirs else ():
        names = attributes_of(nodes[part], "self", "super") - OF_TORCH
        names |= {each.name for each in nodes[part].body if isinstance(each, ast.FunctionDef)}
        assigned = assigned_by(theirs[0], names)
        for name in names - {"__init__"}:
            owner = next((each for each in theirs if name in vars(each)), None)
            owner = owner or (theirs[0] if name in assigned else None)
            if owner is not None:
                yield f"{owner.__module__}:{owner.__name__}", name


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def touched() -> set[tuple[str, str]]:
    """Owner and name of each member that our sources visibly use."""
    nodes: dict[type, ast.ClassDef] = {}
    found: set[tuple[str, str]] = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("ds_"):
                found.add((PARAMETERS, node.attr))
            if path.parent == ADAPTER and isinstance(node, ast.ClassDef) and node.name in HOLDERS:
                place, known_as = HOLDERS[node.name]
                names = attributes_of(node, *known_as) - OF_TORCH
                found |= {(place, name) for name in names}
        module = (
            importlib.import_module(
                ".".join(["deepspeed_ext", *path.relative_to(PACKAGE).with_suffix("").parts])
            )
            if path.parent == ADAPTER
            else None
        )
        for node in tree.body if module is not None else ():
            if isinstance(node, ast.ClassDef):
                kind = getattr(module, node.name)
                if not hasattr(kind, "model_fields"):
                    nodes[kind] = node
    for kind in nodes:
        if not inspect.isabstract(kind):
            found |= set(of_subclass(kind, nodes))
    return found


def form_of(place: str, name: str, before: str) -> str:
    """The form of a member of the installed DeepSpeed; `before`, if that still fits."""
    owner = upstream.found_at(place)
    if before and not upstream.difference(owner, name, before.partition(" since ")[0]):
        return before
    member = inspect.getattr_static(owner, name, None)
    if member is None or name in getattr(owner, "__annotations__", {}):
        return ASSIGNED
    is_function = inspect.isfunction(undecorated(member)) if callable(member) else False
    parameters = list(inspect.signature(undecorated(member)).parameters) if is_function else []
    return f"({', '.join(parameters)})" if is_function else EXISTS


def written() -> dict[str, dict[str, str]]:
    """The contract that our sources ask for."""
    before: dict[str, dict[str, str]] = json.loads(PAGE.read_text())
    inherited = {
        (place, name)
        for place, name in touched()
        if not any(name in before.get(other, {}) for other in [place, *bases_of(place)])
    }
    members = {(place, name) for place, names in before.items() for name in names} | inherited
    found: dict[str, dict[str, Any]] = {}
    for place, name in sorted(members):
        form = form_of(place, name, before.get(place, {}).get(name, ""))
        found.setdefault(place, {})[name] = form
    return found


def bases_of(place: str) -> list[str]:
    """The places of a class's base classes in DeepSpeed."""
    owner = upstream.found_at(place)
    bases = owner.__mro__[1:] if inspect.isclass(owner) else ()
    return [f"{each.__module__}:{each.__name__}" for each in bases]


if __name__ == "__main__":
    PAGE.write_text(json.dumps(written(), indent=1) + "\n")
