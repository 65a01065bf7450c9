"""Target: configs of models that try to have something loaded. Each is counted from shapes, or
refused in one line."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 (makes a folder when it is imported, which no case may do)

from deepspeed_ext.commands.memory import model_file, model_shapes
from deepspeed_ext.errors import DeepSpeedExtError
from deepspeed_ext.runtime.confined import offline
from tests.fuzz import values
from tests.fuzz.target import OutsideError, Parts, Target, require

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
SMALL = {
    "d_model": 32,
    "d_ff": 32,
    "num_layers": 1,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 8,
}
TYPES = (
    "llama",
    "qwen2",
    "qwen2_moe",
    "mistral",
    "mixtral",
    "gemma",
    "phi",
    "gpt2",
    "t5",
    "llava",
    "bert",
    "vit",
)
LOADERS = (
    "detr",
    "dpt",
    "upernet",
    "mask2former",
    "timm_backbone",
    "timm_wrapper",
    "xcodec",
    "edgetam",
    "mamba",
)
"""Types that load something else, or look for it."""
SUB_CONFIGS = (
    "text_config",
    "vision_config",
    "backbone_config",
    "encoder",
    "decoder",
    "semantic_model_config",
)
EVIL = (
    "fuzz/evil",
    "./evil",
    "EVIL",
    "hf-hub:fuzz/evil",
    "local-dir:EVIL",
    "https://127.0.0.1:9/evil",
)
REFERENCES = (
    *("backbone", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone", "model_args"),
    *(
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "encoder_pretrained_model_name_or_path",
        "architecture",
    ),
    *(
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "configuration_files",
    ),
    *(
        "trust_remote_code",
        "quantization_config",
        "checkpoint_path",
        "pretrained_cfg",
        "tokenizer_class",
    ),
    *(
        "torch_dtype",
        "hidden_act",
        "activation_function",
        "architectures",
        "model_type",
        "index_path",
    ),
)


def make(rng: random.Random) -> Parts:
    """Fields of a config: (path of keys, value). The first gives the type."""
    parts: Parts = [(["model_type"], rng.choice(TYPES if rng.random() < 0.6 else LOADERS))]
    for _ in range(rng.randint(1, 5)):
        path = [rng.choice(SUB_CONFIGS) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        if path and rng.random() < 0.7:
            parts.append(([*path, "model_type"], rng.choice(TYPES + LOADERS)))
        parts.append(([*path, _key(rng)], _value(rng)))
    return parts


def _key(rng: random.Random) -> str:
    return rng.choice(REFERENCES if rng.random() < 0.8 else tuple(SHAPES))


def _value(rng: random.Random) -> Any:
    code = {
        "AutoConfig": "evil.Config",
        "AutoModel": "fuzz/evil--evil.Model",
        "AutoModelForCausalLM": "evil.Model",
    }
    known = (
        code,
        {"trust_remote_code": True},
        {"checkpoint_path": "EVIL"},
        True,
        ["evil"],
        3_000_000,
        10**18,
    )
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(EVIL)
    return rng.choice(known) if draw < 0.9 else values.value(rng, 2)


def run(parts: Parts, folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('the code beside a config ran')\n")
    described: dict[str, Any] = {**SHAPES, **SMALL}
    for path, value in parts:
        inner = described
        for key in path[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {**SHAPES, **SMALL}
            inner = inner[key]
        inner[path[-1]] = str(folder / "evil.py") if value == "EVIL" else value
    try:
        text = json.dumps(described)
    except (ValueError, RecursionError):  # ValueError: a number of too many digits for text
        return
    (folder / "config.json").write_text(text)
    tempfile.tempdir = str(folder)
    _tripwire.append(str(folder))
    try:
        model_file.read_model(str(folder))
    except DeepSpeedExtError as error:
        require("\n" not in str(error).strip(), f"more than a line: {error}")
        require("give" in str(error), f"no remedy: {error}")
    finally:
        _tripwire.pop()


_tripwire: list[str] = []
"""The folder whose code must not run, while a case runs."""
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _tripwire:
        return
    if event in _NETWORK or event == "pickle.find_class":
        raise OutsideError(f"{event}{arguments[:2]}")
    if event == "exec" and getattr(arguments[0], "co_filename", "").startswith(_tripwire[-1]):
        raise OutsideError(f"ran {arguments[0].co_filename}")


def prepare() -> None:
    """Count in this process, so that the tripwire sees what the process that counts would do
    unconfined."""
    os.environ.update(offline(os.environ["HOME"]))
    import torch  # noqa: F401
    import transformers  # noqa: F401

    model_file._answer = model_shapes.answer
    sys.addaudithook(_watch)


TARGET = Target("model_file", make, run, prepare)
