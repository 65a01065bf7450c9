"""Target: the section ``zero_optimization``. It is accepted, or refused with an error that is meant
for the user."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_ext.adapter.upstream import DeepSpeedZeroConfig
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import CoreBindingConfig, ZenFlowConfig, ZeroFields
from deepspeed_ext.errors import ConfigError
from tests.fuzz import values
from tests.fuzz.target import Parts, Target, require

DEEPEST = 100
"""Nesting up to which stock has to say what is wrong."""
SECTIONS: dict[str, list[str]] = {
    "zenflow": list(ZenFlowConfig.model_fields),
    "core_binding": list(CoreBindingConfig.model_fields),
    "offload_optimizer": [
        "device",
        "ratio",
        "pin_memory",
        "super_offload",
        "nvme_path",
        "buffer_count",
    ],
    "offload_param": ["device", "buffer_size", "max_in_cpu"],
}
OURS = list(ZeroFields.model_fields)
THEIRS = [name for name in DeepSpeedZeroConfig.model_fields if name not in OURS]
ALMOST = (
    "zenfow",
    "core_bindings",
    "update_intervall",
    "strict",
    "",
    "é",
    "stage ",
    "cpu_offload",
    "model_config",
)
SENSIBLE: tuple[Any, ...] = (
    True,
    False,
    None,
    1,
    2,
    3,
    0.5,
    "auto",
    "cpu",
    "none",
    "predictive",
    "selective",
    {},
)


def make(rng: random.Random) -> Parts:
    """Settings: (path, value)."""
    settings: Parts = [(("stage",), rng.choice([1, 2, 3]))] if rng.random() < 0.7 else []
    for _ in range(rng.randint(1, 8)):
        setting = rng.choice(SENSIBLE) if rng.random() < 0.4 else values.value(rng)
        settings.append((_path(rng), setting))
    return settings


def _path(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.6:
        section = rng.choice(["zenflow", "zenflow", "zenflow", *SECTIONS])
        return section, rng.choice(SECTIONS[section] if rng.random() < 0.9 else ALMOST)
    return (rng.choice(rng.choice([OURS, OURS, THEIRS, ALMOST])),)


def run(parts: Parts, folder: Path) -> None:
    data: dict[str, Any] = {}
    for (*sections, name), setting in parts:
        place: Any = data
        for section in sections:
            place = place.setdefault(section, {})
        if isinstance(place, dict):
            # later parts may be put into it
            place[name] = dict(setting) if isinstance(setting, dict) else setting
    given = (
        data if _depth(data) > DEEPEST else json.loads(json.dumps(data))
    )  # as it comes from a file
    try:
        accepted = ZeroConfig(**given)
    except ConfigError as error:
        require(str(error))
    except ValidationError as error:
        # A whole section that is no section is DeepSpeed's
        # error, whose `zenflow` has always raised it.
        places = [mistake["loc"] for mistake in error.errors() if mistake["loc"] != ("zenflow",)]
        require(not any(place[:1] and place[0] in OURS for place in places), str(error))
    except RecursionError:  # how deep stock gets before it depends on the stack
        require(_depth(given) > DEEPEST)
    except Exception as error:
        if not _upstreams(error, given):
            raise
    else:
        assert accepted.zenflow is None or accepted.zenflow.rule in ("predictive", "selective")


def _depth(value: Any) -> int:
    """How deep a value is nested."""
    level, depth = [value], 0
    while level:
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [one for each in inner if isinstance(each, Iterable) for one in each]
        level = [one for one in level if isinstance(one, dict | list)]
        depth += 1
    return depth


def _upstreams(error: Exception, data: dict[str, Any]) -> bool:
    """Whether DeepSpeed's own code raised `error` because of a setting of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return "/deepspeed/" in last and any(name not in OURS for name in data)


TARGET = Target("config", make, run)
