"""Operators that cosmic-ray does not have: a statement is missing, two arguments are exchanged, or
the end of a range or slice that is no number is off by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator

__all__ = ["ExchangeArguments", "MoveEnd", "RemoveStatement"]

_HAVE_NO_ORDER = frozenset({"gcd", "hypot", "isclose", "lcm", "max", "min", "suppress"})
"""Functions whose result does not depend on the order of their arguments."""
_OF_TYPES = frozenset({"cast", "getattr", "hasattr", "isinstance", "issubclass", "setattr"})
"""Functions that refuse their arguments in another order, wherever they are called."""
_CHANGES = ("+ 1", "- 1")
_NO_ENDS = frozenset({"argument", "arglist", "factor", "number", "operator", "sliceop"})


class _Change(Operator):
    """An operator whose changes to a node are listed by `places`, one for each position."""

    @abstractmethod
    def places(self, node: Any) -> Iterator[Any]:
        """What is changed, for each change of `node`: the first and last node of it."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for first, last in self.places(node):
            yield first.start_pos, last.end_pos


class RemoveStatement(_Change):
    """`pass` in place of a call whose result nobody takes, a `raise`, a `del`, or a change of what
    an object holds, except where a constructor sets it."""

    def places(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            yield node.children[0], node.children[0]

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


class ExchangeArguments(_Change):
    """Two names that are arguments of a call, beside each other and given alike, are exchanged:
    other expressions are of too different types to be mistaken for each other."""

    def places(self, node: Any) -> Iterator[Any]:
        for first, second in self._pairs(node):
            yield first[0][first[1]], second[0][second[1]]

    def mutate(self, node: Any, index: int) -> Any:
        (first, i), (second, j) = list(self._pairs(node))[index]
        one, two = first[i].get_first_leaf(), second[j].get_first_leaf()
        one.prefix, two.prefix = two.prefix, one.prefix
        first[i], second[j] = second[j], first[i]
        return node

    def _pairs(self, node: Any) -> Iterator[tuple[tuple[list[Any], int], tuple[list[Any], int]]]:
        if node.type != "arglist" or _called(node) in _HAVE_NO_ORDER | _OF_TYPES:
            return
        slots = [_slot(node.children, place) for place in range(0, len(node.children), 2)]
        for first, second in pairwise(slots):
            if first is None or second is None:
                continue
            are_alike = (first[0] is node.children) is (second[0] is node.children)
            if are_alike and _code(first) != _code(second):
                yield first, second

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("f(a, b, c)\n", "f(b, a, c)\n"),
            Example("f(a, b, c)\n", "f(a, c, b)\n", occurrence=1),
            Example("f(x=a, y=b)\n", "f(x=b, y=a)\n"),
        )


class MoveEnd(_Change):
    """An end of a range or slice that is not a number, which is another operator's, is one more or
    one less."""

    def places(self, node: Any) -> Iterator[Any]:
        for place in self._ends(node):
            for _ in _CHANGES:
                yield node.children[place], node.children[place]

    def mutate(self, node: Any, index: int) -> Any:
        place = list(self._ends(node))[index // len(_CHANGES)]
        end = node.children[place]
        prefix, code = end.get_first_leaf().prefix, end.get_code(include_prefix=False)
        changed = f"({code}) {_CHANGES[index % len(_CHANGES)]}"
        node.children[place] = parso.python.tree.Name(changed, end.start_pos, prefix)
        return node

    def _ends(self, node: Any) -> Iterator[int]:
        is_range = node.type == "arglist" and _called(node) == "range"
        one = node.type == "trailer" and node.children[0] == "(" and _called(node) == "range"
        if not (is_range or one or node.type == "subscript"):
            return
        for place, child in enumerate(node.children):
            if child.type not in _NO_ENDS:
                yield place

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("range(n)\n", "range((n) + 1)\n"),
            Example("a[i:j]\n", "a[i:(j) - 1]\n", occurrence=3),
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


def _slot(arguments: list[Any], place: int) -> tuple[list[Any], int] | None:
    """The list that holds the value of an argument, and where in it; None if that is no name."""
    siblings, child = arguments, arguments[place]
    if child.type == "argument" and child.children[1] == "=":
        siblings, place = child.children, 2
    return (siblings, place) if _is_name(siblings[place]) else None


def _is_name(node: Any) -> bool:
    """Whether it is a name, or one of something that has a name."""
    if node.type == "atom_expr":
        return node.children[0].type == "name" and all(
            part.type == "trailer" and part.children[0] == "." for part in node.children[1:]
        )
    return bool(node.type == "name")


def _code(slot: tuple[list[Any], int]) -> str:
    return str(slot[0][slot[1]].get_code(include_prefix=False))


def _called(node: Any) -> str:
    """The last name of what is called with these arguments; empty if nothing is."""
    trailer = node if node.type == "trailer" else node.parent
    call = trailer.parent
    if trailer.type != "trailer" or call is None or trailer not in call.children:
        return ""
    before = call.children[call.children.index(trailer) - 1]
    leaf = before.get_last_leaf()
    return str(leaf.value) if leaf.type == "name" else ""
