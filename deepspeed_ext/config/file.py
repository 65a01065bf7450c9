"""Reads a DeepSpeed config file (one Hjson object) as DeepSpeed does, without importing it."""

from __future__ import annotations

import os
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepspeed_ext.config.fields import ZeroFields
from deepspeed_ext.errors import ConfigError

MOST_COUNT = 1 << 31

EXAMPLES = {
    "zero_optimization": '{"stage": 2}',
    "zenflow": '{"update_rule": "predictive"}',
    "core_binding": '{"enabled": true}',
    "offload_optimizer": '{"device": "cpu"}',
    "offload_param": '{"device": "cpu"}',
}
"""The sections that we read, each with a valid value."""


def read_json(path: str, what: str = "--config") -> dict[str, Any]:
    """Read a config file; `what` names it in messages.

    Raises:
        ConfigError: the file does not exist, is not an Hjson object, is empty, has a duplicate key,
            or fails `require_fields`.
    """
    import hjson

    name = f"{what}: {path[:200]}"
    if os.path.isdir(path):
        raise ConfigError(f"{name} is a folder, expected the DeepSpeed config file in it")
    if not os.path.isfile(path):
        raise ConfigError(f"{what}: found no file {path[:200]}")
    hint = f" ({_YAML})" if path.lower().endswith((".yaml", ".yml")) else ""
    try:
        with open(path, encoding="utf-8") as file:
            config = hjson.load(file, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} is not a readable JSON file{hint}: {str(error)[:300]}") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{name} holds a {type(config).__name__}, expected an object, "
            f'such as {{"zero_optimization": {EXAMPLES["zero_optimization"]}}}{hint}'
        )
    if not config:
        raise ConfigError(f"{name} is empty, expected a DeepSpeed config")
    require_fields(config)
    return config


_YAML = "DeepSpeed does not read YAML; give the JSON file that its deepspeed_config_file names"


def require_fields(config: Mapping[Any, Any]) -> None:
    """Check the types of ``zero_optimization`` and of the sections in it that we read, and that no
    field of ours stands at the top or in a section with a name like it: nothing reads it there.
    A user's own sections may hold anything.

    Raises:
        ConfigError: a section is not an object, a key is not a string, or a field stands elsewhere.
    """
    for where, section in [("", config), *config.items()]:
        is_alike = where == "" or (isinstance(where, str) and where.lower().startswith("zero"))
        if where == "zero_optimization" or not (is_alike and isinstance(section, Mapping)):
            continue
        if name := next((name for name in ZeroFields.model_fields if name in section), None):
            place = f"{where}.{name}" if where else f"{name}, at the top of the config,"
            raise ConfigError(f"{place} is read by nothing: move it to zero_optimization.{name}")
    zero = config.get("zero_optimization", {})
    if isinstance(zero, bool):  # DeepSpeed's old form
        return
    sections = {"zero_optimization": zero}
    if isinstance(zero, Mapping):
        given = {f"zero_optimization.{name}": zero.get(name) for name in EXAMPLES}
        sections |= {name: value for name, value in given.items() if value not in (None, "auto")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ConfigError(_no_object(name, section))
        if wrong := [key for key in section if not isinstance(key, str)]:
            kind = type(wrong[0]).__name__
            raise ConfigError(
                f"{name} has the key {shown(wrong[0])} of type {kind}: "
                "keys are names of fields, so strings"
            )


def _no_object(name: str, value: Any) -> str:
    example = EXAMPLES.get(name.rpartition(".")[2], "{}")
    hint = f" ({_YAML})" if isinstance(value, str) and ":" in value else ""
    return f"{name} = {shown(value)}: expected an object, such as {example}{hint}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"duplicate keys: {', '.join(twice)}")
    return dict(pairs)


def section_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the config; empty if it is not given or "auto".

    Raises:
        ConfigError: it is not an object.
    """
    section = config.get(name)
    if section in (None, "auto"):
        return {}
    if not isinstance(section, dict):
        raise ConfigError(_no_object(name, section))
    return section


def shown(value: Any) -> str:
    """`value` for a message, shortened if it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 100
    return short.repr(value)


def count_in(config: Mapping[str, Any], name: str) -> int | None:
    """A whole number of the config, such as a batch size; None if it is not given or "auto".

    Raises:
        ConfigError: it is not a whole number from 1 to `MOST_COUNT`.
    """
    value = config.get(name)
    if value in (None, "auto"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_COUNT:
        raise ConfigError(
            f"{name} = {shown(value)}: expected a whole number from 1 to {MOST_COUNT}"
        )
    return value
