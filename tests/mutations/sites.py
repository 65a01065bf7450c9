"""Finds every place where the package orders the work of a device, or waits for weights that are on
their way, by reading its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["Site", "orders", "sites", "without"]

ORDERS = frozenset({"wait_stream", "wait_event", "record_stream", "record", "synchronize", "wait"})
OUR_NAMES_FOR_THEM = frozenset({"_wait", "_record", "_finish", "order_gathers"})
"""Methods of the package that do nothing but such a wait: each call of one is a wait of its own."""
FOR_WEIGHTS = frozenset(
    {
        *(("link", "complete"), ("arrivals", "complete"), ("self", "_lose_if_failed")),
        *(("_process", "wait_for"), ("_courier", "wait_for")),
    }
)
"""Receivers and methods that wait for weights of the exact rule, or give up those that are lost.
What the adapter calls for it ends in one of these."""
NOT_OF_A_DEVICE = frozenset(
    {
        *(
            "process",
            "_process",
            "all_limited",
            "initial_mask",
            "startup",
            "link",
            "self",
            "_courier",
        ),
        *("interruption", "moment", "transfers"),
    }
)
"""Receivers of such a method that are processes, threads, files, records, callers of what is
listed, or moments to measure."""


@dataclass(frozen=True)
class Site:
    """A statement that orders work.

    Attributes:
        path: the file, relative to the package.
        where: the function that holds it.
        code: the statement.
        lines: its first and last line, from 1.
        column: where it begins.
        number: of the same statements in this function, which one; from 1.
    """

    path: str
    where: str
    code: str
    lines: tuple[int, int]
    column: int
    number: int = 1

    @property
    def name(self) -> str:
        """Its name in the table; it does not change when other lines move."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.path}:{self.where}: {self.code}{again}"


def sites(package: Path = ROOT / "deepspeed_ext") -> list[Site]:
    """Return every site, in the order of files and lines."""
    found: dict[str, Site] = {}
    for path in sorted(package.rglob("*.py")):
        for site in _sites_of(ast.parse(path.read_text()), str(path.relative_to(package))):
            while site.name in found:
                site = replace(site, number=site.number + 1)
            found[site.name] = site
    return list(found.values())


def without(site: Site, source: str) -> str:
    """Return the source of a file with the statement of `site` replaced by ``pass``."""
    lines = source.splitlines(keepends=True)
    first, last = site.lines
    return "".join([*lines[: first - 1], " " * site.column + "pass\n", *lines[last:]])


def _sites_of(tree: ast.AST, path: str, where: tuple[str, ...] = ()) -> Iterator[Site]:
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and orders(node.value.func)
        ):
            assert node.end_lineno is not None
            lines = (node.lineno, node.end_lineno)
            yield Site(path, ".".join(where), ast.unparse(node), lines, node.col_offset)
        yield from _sites_of(node, path, (*where, node.name) if named else where)  # type: ignore[attr-defined]


def orders(function: ast.expr) -> bool:
    """Whether a call of `function` orders work of a device, or waits for it."""
    if not isinstance(function, ast.Attribute):
        return False
    receiver = function.value
    name = (
        receiver.attr
        if isinstance(receiver, ast.Attribute)
        else receiver.id
        if isinstance(receiver, ast.Name)
        else ""
    )
    if function.attr in OUR_NAMES_FOR_THEM or (name, function.attr) in FOR_WEIGHTS:
        return True
    return function.attr in ORDERS and name not in NOT_OF_A_DEVICE
