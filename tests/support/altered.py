"""Checkpoint files with one altered node: every place in their nested content, and what a broken
tool or another program may have put there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.same import first_difference

__all__ = ["Alteration", "alterations", "alter"]

GONE = object()
"""In place of a value: its key or its entry is left out."""
Path_ = tuple[Any, ...]


@dataclass(frozen=True)
class Alteration:
    """One change of one file.

    Attributes:
        file: its name.
        path: keys and indices from the content to the node; a ``.name`` is an attribute.
        what: the name of the change.
    """

    file: str
    path: Path_
    what: str

    def __str__(self) -> str:
        return f"{self.file} {'/'.join(map(str, self.path))}: {self.what}"


def _of_tensor(value: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"none": None, "a number": 3.0, "a list": [1.0]}
    if value.dim():
        found |= {
            "shorter": value[:-1].clone(),
            "longer": torch.cat([value, value[:1]]),
            "empty": value[:0].clone(),
            "one axis more": value.clone().unsqueeze(0),
            "a scalar": torch.tensor(1.0),
        }
    else:
        found |= {"two": torch.ones(2), "NaN": torch.tensor(math.nan), "negative": -value - 1}
    found["int64"] = value.to(torch.int64)
    found["complex"] = value.to(torch.complex64)
    return found


def _changes(value: Any) -> dict[str, Any]:
    """What may stand in the place of a value, by name."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, Mapping):
        return {"none": None, "a list": [1], "a number": 3, "one key more": {**value, "x": 1}}
    if isinstance(value, list | tuple):
        kind = type(value) if type(value) in (list, tuple) else list
        found: dict[str, Any] = {"none": None, "a dict": {"a": 1}, "a number": 3, "words": "words"}
        if value:
            found |= {"shorter": kind(value[:-1]), "empty": kind()}
            found |= {"longer": kind([*value, copy.deepcopy(value[-1])])}
        return found
    if isinstance(value, bool):
        return {"none": None, "not": not value, "words": "words", "a list": [1]}
    if isinstance(value, int | float):
        found = dict[str, Any](none=None, words="words", negative=-3, NaN=math.nan)
        return found | {
            "huge": 1 << 70,
            "infinite": math.inf,
            "half": 0.5,
            "a tensor": torch.ones(2),
        }
    if isinstance(value, str):
        return {"none": None, "a number": 3, "words": "words", "empty": "", "a list": [1]}
    if value is None:
        return {"a number": 3, "words": "words", "a list": [1], "a dict": {"a": 1}}
    return {"none": None, "a number": 3, "a list": [1]}


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif type(value).__module__.endswith("loss_scaler"):
        yield from ((f".{name}", each) for name, each in vars(value).items())


def alterations(file: str, content: Any, path: Path_ = ()) -> Iterator[Alteration]:
    """All alterations of a file with this content."""
    for name, new in _changes(content).items():
        if type(new) is not type(content) or first_difference(content, new):
            yield Alteration(file, path, name)
    if path and not isinstance(path[-1], int):
        yield Alteration(file, path, "missing")
    for key, child in _children(content):
        yield from alterations(file, child, (*path, key))


def alter(folder: Path, change: Alteration) -> None:
    """Write the altered file."""
    path = folder / change.file
    torch.save(_altered(torch.load(path, weights_only=False), change.path, change.what), path)


def _altered(value: Any, path: Path_, what: str) -> Any:
    if not path:
        return GONE if what == "missing" else _changes(value)[what]
    key, rest = path[0], path[1:]
    if isinstance(key, str) and key.startswith("."):
        new = _altered(vars(value)[key[1:]], rest, what)
        if new is GONE:
            delattr(value, key[1:])
        else:
            vars(value)[key[1:]] = new
        return value
    new = _altered(value[key], rest, what)
    if isinstance(value, tuple):
        parts = [*value[:key], *(() if new is GONE else (new,)), *value[key + 1 :]]
        return (
            torch.Size(parts)
            if isinstance(value, torch.Size) and all(isinstance(part, int) for part in parts)
            else tuple(parts)
        )
    if new is GONE:
        del value[key]
    else:
        value[key] = new
    return value
