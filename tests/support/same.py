"""Comparison to the bit that says where it fails: by name, index and element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["assert_same", "first_difference"]


def assert_same(expected: Any, actual: Any, where: str = "value") -> None:
    """Fail with the first place where two nested values differ: its name, index and both values.

    Tensors are compared to the bit: 0.0 and -0.0 differ, a NaN equals a NaN of the same bits.
    `where` begins the name.
    """
    difference = first_difference(expected, actual, where)
    assert not difference, difference


def first_difference(expected: Any, actual: Any, where: str = "value") -> str:
    """The same in words, empty if there is none: for a rank, whose tensors need not travel."""
    if isinstance(expected, torch.Tensor) != isinstance(actual, torch.Tensor):
        return f"{where} is a {type(actual).__name__}, expected a {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        return _of_tensors(expected.detach().cpu(), actual.detach().cpu(), where)
    if is_dataclass(expected) and type(expected) is type(actual):
        names = [field.name for field in fields(expected) if field.compare]
        expected, actual = (
            {name: getattr(each, name) for name in names} for each in (expected, actual)
        )
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if list(expected) != list(actual):
            return f"{where} has the keys {list(actual)}, expected {list(expected)}"
        pairs = [(f"{where}[{key!r}]", expected[key], actual[key]) for key in expected]
    elif _is_list(expected) and _is_list(actual):
        if len(expected) != len(actual):
            return f"{where} has {len(actual)} entries, expected {len(expected)}"
        pairs = [
            (f"{where}[{i}]", one, other)
            for i, (one, other) in enumerate(zip(expected, actual, strict=True))
        ]
    else:
        both_nan = all(isinstance(each, float) and math.isnan(each) for each in (expected, actual))
        return (
            ""
            if both_nan or expected == actual
            else f"{where} is {actual!r}, expected {expected!r}"
        )
    return next(
        filter(None, (first_difference(one, other, name) for name, one, other in pairs)), ""
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _of_tensors(expected: torch.Tensor, actual: torch.Tensor, where: str) -> str:
    found, wanted = ((each.dtype, tuple(each.shape)) for each in (actual, expected))
    if found != wanted:
        return f"{where} is {found}, expected {wanted}"
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (expected, actual)]
    if torch.equal(*bits):
        return ""
    apart = (bits[0] != bits[1]).view(expected.numel(), -1).any(1).nonzero().view(-1)
    first = int(apart[0])
    values = [each.contiguous().view(-1)[first].item() for each in (actual, expected)]
    index = (
        list(map(int, torch.unravel_index(torch.tensor(first), expected.shape)))
        if expected.ndim > 1
        else first
    )
    what = f"element {index} is {values[0]!r}, expected {values[1]!r}"
    return f"{where}: {len(apart)} of {expected.numel()} elements differ; {what}"
