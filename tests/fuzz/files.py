"""Target: config files of every kind, and dicts that no file can hold. Each is read, or refused
with an error that is meant for the user; an error of DeepSpeed's is about what DeepSpeed reads."""

from __future__ import annotations

import json
import random
import traceback
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_ext.adapter.upstream import swapped, zero_section_class
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig
from deepspeed_ext.config.file import EXAMPLES, read_json
from deepspeed_ext.errors import ConfigError
from tests.fuzz import values
from tests.fuzz.target import Parts, Target, require

NAMES = ("ds.json", "ds.yaml", "DS.YML", "ds", "train.py", "ds.toml")
PLACES = ("folder", "missing", "dict")
KEYS: tuple[Any, ...] = (1, None, True, 0.5, ("a", 1), b"stage", frozenset())
TEXTS = (
    *(
        "",
        " \n",
        "# a comment",
        "null",
        "[]",
        '"x"',
        "3",
        "{",
        "}",
        "{}",
        "%PDF-1.4",
        "import deepspeed\n",
    ),
    *(
        "zero_optimization:\n  stage: 2\n",
        "- a\n- b\n",
        "[tool]\nstage = 2\n",
        "stage: 2",
        "\ufeff{}",
        "\0",
    ),
    '{"zero_optimization": {}, "zero_optimization": {}}',
)
BATCH = {"train_micro_batch_size_per_gpu": 1}


def make(rng: random.Random) -> Parts:
    """The place of the config, then either a text or settings of ``zero_optimization``: (section,
    value)."""
    place = rng.choice(PLACES if rng.random() < 0.3 else NAMES)
    if place != "dict" and rng.random() < 0.4:
        return [place, rng.choice(TEXTS) if rng.random() < 0.7 else values.text(rng)]
    names = ["zero_optimization", *EXAMPLES]
    return [place, *((rng.choice(names), _section(rng)) for _ in range(rng.randint(1, 3)))]


def _section(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return {rng.choice(KEYS): values.value(rng, 1)}
    return values.value(rng, 2)


def _config(settings: Parts) -> dict[Any, Any]:
    config: dict[Any, Any] = {**BATCH, "zero_optimization": {"stage": 2}}
    for name, setting in settings:
        zero = config["zero_optimization"]
        if name == "zero_optimization" or not isinstance(zero, dict):
            config["zero_optimization"] = setting
        else:
            zero[name] = setting
    return config


def _text(settings: Parts) -> str:
    try:
        return json.dumps(_config(settings), skipkeys=True)
    except (RecursionError, ValueError):
        return "{"


def run(parts: Parts, folder: Path) -> None:
    place, *content = parts or ["missing"]
    if not isinstance(place, str):  # it was left out
        place, content = "dict", parts
    if place == "dict":
        _read(_config([part for part in content if isinstance(part, tuple)]))
        return
    path = folder / "config"
    if place == "folder":
        path.mkdir()
    elif place != "missing":
        path = folder / place
        text = content[0] if content and isinstance(content[0], str) else _text(content)
        path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        read_json(str(path))
    except ConfigError as error:
        require(str(error).strip())
    if place != "missing":  # DeepSpeed takes such a text for base64
        _read(str(path))


def _read(config: Any) -> None:
    try:
        with swapped(zero_section_class(ZeroConfig)):
            Config(config)
    except ConfigError as error:
        require(str(error).strip())
    except ValidationError as error:
        places = [mistake["loc"] for mistake in error.errors()]
        require(not any(len(place) == 1 and place[0] in EXAMPLES for place in places), str(error))
    except Exception as error:
        if "/deepspeed/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise


TARGET = Target("files", make, run)
