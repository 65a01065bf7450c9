"""Which attributes DeepSpeed's code assigns, read from its bytecode."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from deepspeed_ext.adapter import upstream
from deepspeed_ext.adapter.upstream import ASSIGNED, undecorated


def unassigned() -> list[str]:
    """One line for each member of the contract that DeepSpeed should assign and does not."""
    found = []
    for owner_name, members in upstream.expected().items():
        wanted = {name for name, form in members.items() if form == ASSIGNED}
        missing = wanted - assigned_by(upstream.found_at(owner_name), wanted) if wanted else set()
        found += [f"{owner_name}.{name} is not assigned anywhere" for name in sorted(missing)]
    return found


def assigned_by(owner: Any, wanted: set[str]) -> set[str]:
    """Return those of `wanted` that the class's methods assign to ``self``, or the module's
    functions to any object."""
    if inspect.isclass(owner):
        classes = [each for each in owner.__mro__ if each.__module__.startswith("deepspeed.")]
        functions = []
    else:
        inside = [
            each
            for each in vars(owner).values()
            if getattr(each, "__module__", "") == owner.__name__
        ]
        classes = [each for each in inside if inspect.isclass(each)]
        functions = [each for each in inside if inspect.isfunction(each)]
    functions += [
        each for a_class in classes for each in vars(a_class).values() if inspect.isfunction(each)
    ]
    found: set[str] = set()
    for function in functions:
        if found == wanted:
            break
        found.update(
            stored_by(
                undecorated(function).__code__, wanted - found, to_self=inspect.isclass(owner)
            )
        )
    return found


def stored_by(code: CodeType, wanted: set[str], to_self: bool) -> Iterator[str]:
    """Yield those of `wanted` that a function, or one inside it, assigns: to ``self``, or to any
    object."""
    if not wanted.isdisjoint(code.co_names):
        before: Any = None
        for instruction in dis.get_instructions(code):
            stores = instruction.opname == "STORE_ATTR" and instruction.argval in wanted
            if stores and (before == "self" or not to_self):
                yield instruction.argval
            # Python 3.13 may load two names by one instruction.
            before = instruction.argval
            before = before[-1] if isinstance(before, tuple) and before else before
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from stored_by(constant, wanted, to_self)
