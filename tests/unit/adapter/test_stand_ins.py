"""DeepSpeed uses of our stand-ins what the contract lists, and they have it."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import inspect
import json
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest

from deepspeed_ext.adapter.upstream import PAGE, undecorated

StandIn = dict[str, Any]
STAND_INS: list[StandIn] = json.loads(PAGE.with_name("stand_ins.json").read_text())


def function_of(where: str) -> Any:
    module, _, path = where.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return undecorated(found)


def is_known(node: ast.AST, names: set[str]) -> bool:
    text = ast.unparse(node)
    return any(
        text == name or ("*" in name and fnmatch.fnmatchcase(text, name.replace("[", "[[]")))
        for name in names
    )


def used_in(tree: ast.AST, known_as: Sequence[str]) -> set[str]:
    """The attributes of what is known as one of these expressions, or assigned from one, that the
    code uses."""
    names = set(known_as)
    for node in ast.walk(tree):  # later names of it, such as ``partition = self.partitions[i]``
        if isinstance(node, ast.Assign) and is_known(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_known(node.value, names)
    }
    called = any(
        isinstance(node, ast.Call) and is_known(node.func, names) for node in ast.walk(tree)
    )
    return used | ({"()"} if called else set())


def uses(stand_in: StandIn) -> set[str]:
    found: set[str] = set()
    for where in stand_in["where"]:
        source = textwrap.dedent(inspect.getsource(function_of(where)))
        found |= used_in(ast.parse(source), stand_in["known_as"])
    return found


@pytest.mark.parametrize(
    "stand_in", STAND_INS, ids=lambda each: f"{each['ours']} {each['where'][0].rpartition('.')[2]}"
)
def test_deepspeed_uses_what_is_listed_and_ours_has_it(stand_in: StandIn) -> None:
    assert uses(stand_in) == set(stand_in["uses"])
    module, _, name = stand_in["ours"].partition(":")
    module = module if "." in module else f"deepspeed_ext.adapter.{module}"
    ours = getattr(importlib.import_module(module), name)
    source = inspect.getsource(ours)
    for used in set(stand_in["uses"]) - {"()"}:
        assert hasattr(ours, used) or f"self.{used}" in source or hasattr(ours, "__getattr__"), used
    assert "()" not in stand_in["uses"] or callable(ours.__call__)


def test_another_use_would_be_found() -> None:
    tree = ast.parse(
        "part = self.parts[i]\npart.grad = "
        "part.data\nself.parts[j].numel()\nself.other[i].gone()\nf(x)"
    )
    assert used_in(tree, ("self.parts[*]", "f")) == {"grad", "data", "numel", "()"}
