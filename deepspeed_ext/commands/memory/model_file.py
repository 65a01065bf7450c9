"""Counts the parameters of a Hugging Face ``config.json``, by shapes on the meta device.

No weights are read or made, nothing is downloaded, and no code runs but transformers' own. A config
may be hostile, so three lines of defence keep it from loading anything: `model_references` removes
or refuses every reference; another process builds the model, offline and without tokens; and that
process is confined (`runtime.confined`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.commands.memory.model_references import inert
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.confined import offline
from deepspeed_ext.runtime.process import python_command
from deepspeed_ext.runtime.words import quoted

__all__ = ["ModelFile", "read_model"]

MOST_BYTES = 1 << 24
"""Larger than any config.json, even with 21,000 image classes; a larger file holds weights."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_OF_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_SHAPES = "deepspeed_ext.commands.memory.model_shapes"


@dataclass(frozen=True)
class ModelFile:
    """What a ``config.json`` says of a model.

    Attributes:
        name: class of the model.
        params: elements of all parameters; one that is used twice counts once.
        largest: elements of the largest parameter.
        active: elements that a token uses; of experts, only those it is routed to.
        notes: remarks on the count.
    """

    name: str
    params: int
    largest: int
    active: int
    notes: tuple[str, ...] = ()


def read_model(path: str) -> ModelFile:
    """Count the parameters of the model that `path`, a ``config.json`` or a folder with one,
    describes.

    Raises:
        ConfigError: there is no such file, or transformers builds no model from it.
        UnsupportedError: transformers is missing.
    """
    file = _file_of(path)
    described = _object_in(file)
    try:
        found = _answer(inert(described))
    except ConfigError as error:
        raise ConfigError(f"--model: {_shown(file)}: {error}; fix it, or give --params") from None
    if "absent" in found:
        raise UnsupportedError(
            f"--model needs transformers ({found['absent']}): pip install "
            "'deepspeed-ext[transformers]', or give --params"
        )
    if "problem" in found:
        ending = f"; {found['change']}, or give --params"
        if found["is_unknown"] and "auto_map" in described:
            ending = ", and code that comes with a model is not run; give --params"
        raise ConfigError(f"--model: {_shown(file)}: {found['problem']}{ending}")
    counts = (found["params"], found["largest"], found["active"])
    return ModelFile(found["name"], *counts, tuple(_notes(described, found["towers"])))


def _answer(described: dict[str, Any]) -> dict[str, Any]:
    """Ask `model_shapes`, in a process without network or tokens."""
    with tempfile.TemporaryDirectory(prefix="dsext-plan-") as folder:
        done = subprocess.run(
            python_command(_SHAPES),
            input=json.dumps(described).encode(),
            capture_output=True,
            cwd=folder,
            env=offline(folder),
            check=False,
        )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if done.returncode == -signal.SIGPROF:
        raise ConfigError("transformers takes more than a minute to build its model")
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise ConfigError(
        "the process that builds its model ended with status "
        f"{done.returncode} ({''.join(said)[:200]})"
    )


def _shown(file: str) -> str:
    """A path in a message."""
    return repr(file[:200])


def _file_of(path: str) -> str:
    """The file that `path` means."""
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if os.path.isfile(file):
        return file
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise ConfigError(
            f"--model: {_shown(path)} holds an adapter; "
            "give --params of the adapter, which is what trains"
        )
    if os.path.isdir(path):
        raise ConfigError(
            f"--model: the folder {_shown(path)} holds no config.json; "
            "give the one that does, or --params"
        )
    name = (
        "; nothing is downloaded: for a model on a hub, download config.json first"
        if _HUB.fullmatch(path)
        else ""
    )
    raise ConfigError(
        f"--model: found no config.json at {_shown(path)}; "
        f"give the file, or the folder that holds it{name}"
    )


def _object_in(file: str) -> dict[str, Any]:
    """The file's content, which is an object with a ``model_type``."""
    if os.path.getsize(file) > MOST_BYTES:
        raise ConfigError(
            f"--model: {_shown(file)} is larger than {MOST_BYTES >> 20} MiB; give the "
            f"config.json, not the weights"
        )
    try:
        with open(file, encoding="utf-8") as opened:
            described = json.load(opened)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model: {_shown(file)} is not JSON ({str(error)[:100]}); "
            "fix it, or give another config.json or --params"
        ) from None
    if isinstance(described, dict) and isinstance(described.get("model_type"), str):
        return described
    if isinstance(described, dict) and not described.keys().isdisjoint(_OF_DEEPSPEED):
        raise ConfigError(
            f"--model: {_shown(file)} is a DeepSpeed config; "
            "give it as --config, and the model's config.json here"
        )
    raise ConfigError(
        f"--model: {_shown(file)} names no model_type, which transformers' config.json has; give "
        "one that does, or --params"
    )


def _notes(described: dict[str, Any], towers: int) -> Iterator[str]:
    """What a reader must know of the count."""
    quantized = described.get("quantization_config")
    if isinstance(quantized, dict) and quantized:
        method = quoted(str(quantized.get("quant_method", "it does not say how")))
        yield (
            f"the weights are quantized ({method}); counted as if all train, unquantized. For an "
            "adapter, give --params."
        )
    if towers:
        yield (
            f"{towers:,} of the parameters are for images or sound; "
            "if they stay frozen, give the number of the others as --params."
        )
