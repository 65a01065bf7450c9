"""Reads a DeepSpeed config file as DeepSpeed does, without importing it: an object of Hjson, no larger than configs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepspeed_ext.errors import ConfigError

__all__ = ["count_in", "is_deeper", "read_json", "section_of"]

MOST_BYTES = 1 << 20
"""A config is smaller than that; anything larger is another file, and hjson takes two seconds for a MiB."""
MOST_COUNT = 1 << 31
MOST_DEPTH = 64
"""Of sections in sections. A config has a handful, and copying one of hundreds fails in Python."""


def read_json(path: str) -> dict[str, Any]:
    """Read the file that ``--config`` names.

    Raises:
        ConfigError: there is none, or it holds no object, or the same key twice.
    """
    import hjson

    if not os.path.isfile(path):
        raise ConfigError(f"--config: found no file {path[:200]}")
    try:
        if os.path.getsize(path) > MOST_BYTES:
            raise ConfigError(f"--config: {path[:200]} is larger than {MOST_BYTES:,} bytes")
        with open(path, encoding="utf-8") as file:
            config = hjson.load(file, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"--config: {path[:200]} is not a readable JSON file: {str(error)[:300]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config: {path[:200]} holds a {type(config).__name__}, expected an object")
    if is_deeper(config, MOST_DEPTH):
        raise ConfigError(f"--config: {path[:200]} is nested more than {MOST_DEPTH} deep")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file, whose keys are different."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"these keys come more than once: {', '.join(twice)}")
    return dict(pairs)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether dicts and lists are nested more than `levels` deep. Iterative, because Python limits recursion."""
    level = [value]
    for _ in range(levels):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def section_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the config; empty if it is not given or "auto".

    Raises:
        ConfigError: it is no object.
    """
    section = config.get(name)
    if section in (None, "auto"):
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name} is a {type(section).__name__}, expected an object")
    return section


def count_in(config: Mapping[str, Any], name: str) -> int | None:
    """A whole number of the config, such as a batch size; None if it is not given or "auto".

    Raises:
        ConfigError: it is no whole number, or none that a run can have.
    """
    value = config.get(name)
    if value in (None, "auto"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_COUNT:
        raise ConfigError(f"{name}: expected a whole number from 1 to {MOST_COUNT}")
    return value
