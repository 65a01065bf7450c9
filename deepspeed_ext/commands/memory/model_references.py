"""Removes from a ``config.json`` what refers to other files, hubs or code. Imports neither torch
nor transformers.

A config describes shapes. Some fields of transformers name something to load instead: the code of
the model (``auto_map``), kernels (``attn_implementation``), another model (``backbone``). What does
not change the shapes is left out. What does is refused, because the shapes are then elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.words import quoted

__all__ = ["MOST_LAYERS", "inert", "require_inert"]

MOST_LAYERS = 10_000
"""More than any model has, of layers or of experts per layer."""
_LEFT_OUT = re.compile(
    r"auto_map|_?name_or_path|configuration_files|custom_pipelines|trust_remote_code|_?commit_hash|token|use_auth_token"
    r"|quantization_config|\w*_implementation(_internal)?"
)
_REFERENCE = re.compile(
    r"backbone|backbone_kwargs|use_timm_backbone|use_pretrained_backbone|model_args|checkpoint_path|pretrained_cfg\w*"
    r"|\w+_name_or_path"
)
"""``backbone_config`` is not a reference: it holds the shapes."""
_COUNT = re.compile(r"(\w*_)?(n|num)_(\w+_)?(layers?|blocks|experts)|(\w+_)?(layers|depth)")
_HUB = re.compile(r"\s*(hf[-_]hub|local[-_]dir|https?|file):", re.IGNORECASE)


def inert(described: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parsed config without the fields that are only references, at any depth.

    Raises:
        ConfigError: see `require_inert`.
    """
    require_inert(described)
    copied: dict[str, Any] = {}
    open_: list[tuple[Any, Any]] = [(described, copied)]
    while open_:  # a file may be nested deeper than Python's stack
        source, target = open_.pop()
        for key, value in source.items() if isinstance(source, dict) else enumerate(source):
            if isinstance(key, str) and _LEFT_OUT.fullmatch(key):
                continue
            into: Any = {} if isinstance(value, dict) else [] if isinstance(value, list) else value
            if isinstance(value, dict | list):
                open_.append((value, into))
            if isinstance(target, dict):
                target[key] = into
            else:
                target.append(into)
    return copied


def require_inert(described: Any) -> None:
    """Check a parsed config, or the dict that transformers makes of it.

    Raises:
        ConfigError: a field at any depth says where to load something, or asks for more than
            `MOST_LAYERS` layers.
    """
    open_ = [described]
    while open_:
        value = open_.pop()
        if isinstance(value, dict):
            for key, each in value.items():
                _require_inert_field(str(key), each)
            open_ += value.values()
        elif isinstance(value, list | tuple):
            open_ += value


def _require_inert_field(key: str, value: Any) -> None:
    if _LEFT_OUT.fullmatch(key):
        return
    if (_REFERENCE.fullmatch(key) and value) or (isinstance(value, str) and _HUB.match(value)):
        raise ConfigError(
            f"its field {quoted(key)} names something else to load "
            f"({quoted(str(value)[:60])}), and nothing is loaded"
        )
    if isinstance(value, int | float) and value > MOST_LAYERS and _COUNT.fullmatch(key):
        raise ConfigError(f"its field {quoted(key)} is {value:,}, expected at most {MOST_LAYERS:,}")
