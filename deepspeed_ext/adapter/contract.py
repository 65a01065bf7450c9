"""Compares the installed DeepSpeed with `contract.json`, the members of it that we rely on.

The file is data: class (``module:Class``) or module, then name of a member, then its form:
``"(self, closure)"`` a function with these parameters in this order, perhaps among others;
``"exists"`` anything; ``"assigned"`` an attribute that DeepSpeed's methods assign (for a module,
one that its functions set on any object). ``since 0.19.8`` marks what older releases lack.
`tests.support.contract` writes it from our sources, and a test compares it with them. So if
DeepSpeed renames a method, start-up fails, instead of our override silently having no effect.

`stand_ins` lists what DeepSpeed uses of our objects that stand in for its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

EXISTS = "exists"
ASSIGNED = "assigned"
PAGE = Path(__file__).with_name("contract.json")


def release() -> tuple[int, int, int]:
    """The installed DeepSpeed's version."""
    deepspeed = importlib.import_module("deepspeed")
    return deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__


@cache
def expected() -> dict[str, dict[str, str]]:
    """The contract with the installed release."""
    found: dict[str, dict[str, str]] = {}
    for owner, members in json.loads(PAGE.read_text()).items():
        for name, form in members.items():
            form, _, first = form.partition(" since ")
            if not first or release() >= tuple(map(int, first.split("."))):
                found.setdefault(owner, {})[name] = form
    return found


def broken() -> list[str]:
    """One line per member of the installed DeepSpeed that differs from the contract. Only a test
    compares `ASSIGNED` members: it reads DeepSpeed's bytecode."""
    lines = []
    for place, members in expected().items():
        try:
            owner = found_at(place)
        except (ImportError, AttributeError):
            lines.append(f"{place} does not exist")
            continue
        told = ((name, difference(owner, name, form)) for name, form in members.items())
        lines += [f"{place}.{name} {how}" for name, how in told if how]
    return lines


def found_at(place: str) -> Any:
    """The class or module that the contract names by `place`."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def difference(owner: Any, name: str, form: str) -> str:
    """How a member differs from its form; empty if it does not."""
    if form == ASSIGNED:
        return ""
    member = inspect.getattr_static(owner, name, None)
    if member is None or form == EXISTS:
        return "does not exist" if member is None else ""
    has = iter(found := list(inspect.signature(undecorated(member)).parameters))
    fits = all(parameter in has for parameter in form.strip("()").split(", ") if parameter)
    return "" if fits else f"takes ({', '.join(found)}), expected {form}"


def undecorated(member: Any) -> Any:
    """The function inside a ``(*args, **kwargs)`` decorator, such as DeepSpeed's for profiler
    ranges; otherwise `member`."""
    cells = [cell.cell_contents for cell in getattr(member, "__closure__", None) or ()]
    functions = [cell for cell in cells if inspect.isfunction(cell)]
    takes_anything = tuple(inspect.signature(member).parameters) == ("args", "kwargs")
    return functions[0] if takes_anything and len(functions) == 1 else member
