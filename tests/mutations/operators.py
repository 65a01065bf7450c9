"""An operator that cosmic-ray does not have: a statement is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator

__all__ = ["RemoveStatement"]


class RemoveStatement(Operator):
    """`pass` in place of a call whose result nobody takes, a `raise`, a `del`, or a change of what
    an object holds, except where a constructor sets it."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        prefix = first.get_first_leaf().prefix
        node.children[0] = parso.python.tree.Keyword("pass", first.start_pos, prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("put(1)\n", "pass\n"),
            Example("a.b += 1\n", "pass\n"),
            Example("a[1] = 2\n", "pass\n"),
            Example("raise E\n", "pass\n"),
        )


def _has_effect(statement: Any) -> bool:
    if statement.type in ("raise_stmt", "del_stmt"):
        return True
    if statement.type == "expr_stmt":
        target, change = statement.children[:2]
        if change != "=":
            return change.type != "annassign"  # `+=` and the like; or a declaration
        return target.type == "atom_expr" and not _is_in_constructor(statement)
    if statement.type != "atom_expr":
        return False
    last = statement.children[-1]
    return last.type == "trailer" and last.children[0] == "("


def _is_in_constructor(node: Any) -> bool:
    function: Any = parso.python.tree.search_ancestor(node, "funcdef")
    return function is not None and function.name.value in ("__init__", "__post_init__")
