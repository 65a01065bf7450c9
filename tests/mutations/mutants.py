"""Draws random mutants of the modules that decide: one comparison, operator, constant or condition
is another.

The operators are those of cosmic-ray. Of its runner nothing is used: it starts a process for each
mutant, which would import torch and DeepSpeed each time, and runs one test command for all of them.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    number_replacer,
    unary_operator_replacement,
    zero_iteration_for_loop,
)

from tests.mutations.operators import RemoveStatement
from tests.support.paths import ROOT

__all__ = ["KINDS", "MODULES", "Mutant", "Site", "draw", "sites_of"]

_PACKAGE = ROOT / "deepspeed_ext"
_HARMS = re.compile(
    r"\bkill|signal|affinity|prctl|mbind|os\.replace|rename|rmtree|unlink|subprocess|Popen|__main__"
)
"""A wrong number beside these names harms the machine."""
MODULES = tuple(
    str(path.relative_to(_PACKAGE))
    for path in sorted(_PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" and not _HARMS.search(path.read_text())
)
"""What is mutated. Not here: what sends signals, binds other processes or replaces files."""

_LIKELY = (
    "Add_Sub Sub_Add Mul_Div Mul_FloorDiv Div_Mul FloorDiv_Div FloorDiv_Mul Mod_FloorDiv Pow_Mul "
    "LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr Delete_USub Delete_Not Delete_Invert"
)
"""Of the operators that replace or delete an operator of arithmetic: those that a person might
mistake for it. Of the others, most give an error of type wherever they are."""
_SAME = "Is_Eq Eq_Is IsNot_NotEq NotEq_IsNot"
"""Comparisons that differ only for objects that are equal to others."""


GUARDS = frozenset({"strict", "frozen", "init"})
"""Arguments that only guard."""


def _named(operators: Iterable[type], names: str) -> tuple[type, ...]:
    return tuple(
        operator for operator in operators if operator.__name__.partition("_")[2] in names.split()
    )


def _all_but(operators: Iterable[type], names: str) -> tuple[type, ...]:
    return tuple(
        operator
        for operator in operators
        if operator.__name__.partition("_")[2] not in names.split()
    )


KINDS: dict[str, tuple[type, ...]] = {
    "comparison": _all_but(comparison_operator_replacement.operators(), _SAME),
    "arithmetic": (
        *_named(binary_operator_replacement.operators(), _LIKELY),
        *_named(unary_operator_replacement.operators(), _LIKELY),
    ),
    "constant": (
        number_replacer.NumberReplacer,
        boolean_replacer.ReplaceTrueWithFalse,
        boolean_replacer.ReplaceFalseWithTrue,
    ),
    "condition": (
        boolean_replacer.AddNot,
        boolean_replacer.ReplaceAndWithOr,
        boolean_replacer.ReplaceOrWithAnd,
        break_continue.ReplaceBreakWithContinue,
        break_continue.ReplaceContinueWithBreak,
        zero_iteration_for_loop.ZeroIterationForLoop,
    ),
    "statement": (RemoveStatement,),
}


@dataclass(frozen=True)
class Site:
    """A place that can be mutated, and how.

    Attributes:
        path: the file, relative to the package.
        kind: one of `KINDS`.
        start, end: line, from 1, and column, from 0.
        ways: operators of cosmic-ray, each with which of its occurrences in the file this is.
    """

    path: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    ways: tuple[tuple[type, int], ...]


@dataclass(frozen=True)
class Mutant:
    """A file of the package with one change.

    Attributes:
        site: where.
        source: the whole file, changed.
    """

    site: Site
    original: str
    source: str

    @cached_property
    def diff(self) -> str:
        """The changed lines."""
        found = difflib.unified_diff(
            self.original.splitlines(), self.source.splitlines(), lineterm="", n=0
        )
        return "\n".join(
            line for line in found if line[:3] not in ("---", "+++") and line[:2] != "@@"
        )

    @property
    def name(self) -> str:
        return f"{self.site.path}:{self.site.start[0]}:{self.site.start[1]}: {self.diff}"

    @property
    def lines(self) -> range:
        """The lines of the statement that holds the change, without what it holds in turn."""
        return _statement(self.original, self.site.start[0])


def draw(
    count: int,
    seed: int,
    paths: Sequence[str] = MODULES,
    kinds: Iterable[str] = KINDS,
    package: Path = ROOT / "deepspeed_ext",
) -> list[Mutant]:
    """Return `count` mutants of these kinds at different places, each with a random one of the ways
    to change its place.

    The chance of a place depends on its own line only: what changes elsewhere changes nothing of
    the draw.
    """
    sources = {path: (package / path).read_text() for path in paths}
    chances: list[tuple[random.Random, Site]] = []
    seen: Counter[str] = Counter()
    for site in (
        site for path, source in sources.items() for site in sites_of(path, source, kinds)
    ):
        line = sources[site.path].splitlines()[site.start[0] - 1]
        place = f"{site.path}:{site.kind}:{site.start[1]}:{line}"
        seen[place] += 1
        chances.append((random.Random(f"{seed}:{place}:{seen[place]}"), site))
    found: list[Mutant] = []
    for _, chance, site in sorted(
        ((chance.random(), chance, site) for chance, site in chances), key=lambda row: row[0]
    ):
        if len(found) == count:
            break
        operator, occurrence = chance.choice(site.ways)
        source = mutate_code(sources[site.path], operator(), occurrence)
        if source is not None and source != sources[site.path] and _compiles(source):
            found.append(Mutant(site, sources[site.path], source))
    return found


def sites_of(path: str, source: str, kinds: Iterable[str] = KINDS) -> Iterator[Site]:
    """Find every place of a file that an operator of these kinds can change.

    Not annotations, which nothing reads, nor what only guards: assertions, whether `zip` is strict,
    whether a dataclass is frozen, of which tests/unit/test_dataclasses.py takes care, and whether
    its constructor takes a field.
    """
    nodes, skipped = list(_nodes(get_ast(source))), list(_skipped(source))
    ways: dict[tuple[str, Any, Any], list[tuple[type, int]]] = {}
    for kind in kinds:
        for operator in KINDS[kind]:
            change: Any = operator()
            places = [place for node in nodes for place in change.mutation_positions(node)]
            for occurrence, (start, end) in enumerate(places):
                if not any(first <= start < last for first, last in skipped):
                    ways.setdefault((kind, start, end), []).append((operator, occurrence))
    for (kind, start, end), found in sorted(ways.items(), key=lambda item: item[0][1:]):
        yield Site(path, kind, start, end, tuple(found))


def _nodes(node: Any) -> Iterator[Any]:
    """All nodes of a tree in the order in which cosmic-ray visits and counts them."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _skipped(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where that begins and ends which no mutant changes."""
    for node in ast.walk(ast.parse(source)):
        part: ast.AST | None = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            part = node.returns
            if node.args.kwonlyargs and not node.args.vararg:  # a `*` that multiplies nothing
                first = node.args.kwonlyargs[0]
                yield (node.lineno, node.col_offset), (first.lineno, first.col_offset)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            part = node.annotation
        elif isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg in GUARDS):
            part = node
        if isinstance(part, ast.expr | ast.stmt | ast.keyword):
            yield _span(part)


def _span(node: ast.expr | ast.stmt | ast.keyword) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _statement(source: str, line: int) -> range:
    """The lines of the innermost statement around `line`; of one that holds others, only those
    before the first."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt | ast.ExceptHandler) and node.lineno <= line <= (
            node.end_lineno or 0
        ):
            body = getattr(node, "body", None)
            end = body[0].lineno if isinstance(body, list) and body else (node.end_lineno or 0) + 1
            found = (
                range(node.lineno, max(end, node.lineno + 1))
                if line < max(end, node.lineno + 1)
                else found
            )
    return found


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
