"""Counts the parameters of a Hugging Face ``config.json``, by shapes on the meta device. Imports transformers.

No weights are read or made, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.log import quoted

__all__ = ["ModelFile", "read_model"]

MOST_BYTES = 1 << 24
"""No config.json is larger, even if it names 21,000 classes of images; a larger file holds weights."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_OF_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
"""What a model of a type is for, if its file names no class."""
_TOWER = re.compile(r"(^|[._])(vision|visual|image|audio|speech)")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


@dataclass(frozen=True)
class ModelFile:
    """What a ``config.json`` says of a model.

    Attributes:
        name: class of the model.
        params: elements of all parameters; one that is used twice counts once.
        largest: elements of the largest parameter.
        active: elements that a token uses: of the experts only those that it is sent to.
        notes: what a reader must know of the count.
    """

    name: str
    params: int
    largest: int
    active: int
    notes: tuple[str, ...] = ()


def read_model(path: str) -> ModelFile:
    """Count the parameters of the model that `path`, a ``config.json`` or a folder with one, describes.

    Raises:
        ConfigError: there is no such file, or transformers builds no model from it.
        UnsupportedError: transformers is missing.
    """
    file = _file_of(path)
    described = _object_in(file)
    try:
        import torch
        import transformers
    except Exception as error:  # a broken installation raises more than ImportError
        raise UnsupportedError(
            f"--model needs transformers ({str(error)[:300]}): pip install 'deepspeed-ext[transformers]', or give "
            "--params"
        ) from None
    try:
        with contextlib.redirect_stdout(io.StringIO()), _only_errors(transformers):
            _require_known(described, file, transformers)
            # Without the last argument it asks at a terminal whether to run code that the file names.
            config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = _class_of(config, transformers)(config)
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers raises for a file that describes no model
        change = "install what it names" if isinstance(error, ImportError) else "mend the file"
        raise ConfigError(
            f"--model: transformers {transformers.__version__} builds no model from {_shown(file)}: "
            f"{type(error).__name__}: {str(error)[:250]}; {change}, or give --params"
        ) from None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if not sizes:
        raise ConfigError(f"--model: the model of {_shown(file)} has no parameters; give --params")
    params = sum(sizes.values())
    experts = sum(numel for name, numel in sizes.items() if _EXPERT.search(name))
    return ModelFile(
        type(model).__name__,
        params,
        max(sizes.values()),
        params - round(experts * (1 - _share(config))),
        tuple(_notes(described, sizes)),
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
            f"--model: {_shown(path)} holds an adapter; give --params of the adapter, which is what trains"
        )
    if os.path.isdir(path):
        raise ConfigError(
            f"--model: the folder {_shown(path)} holds no config.json; give the one that does, or --params"
        )
    name = "; nothing is downloaded: of a model on a hub, download config.json first" if _HUB.fullmatch(path) else ""
    raise ConfigError(
        f"--model: found no config.json at {_shown(path)}; give the file, or the folder that holds it{name}"
    )


def _object_in(file: str) -> dict[str, Any]:
    """The file's content, which is an object with a ``model_type``."""
    if os.path.getsize(file) > MOST_BYTES:
        raise ConfigError(
            f"--model: {_shown(file)} is larger than {MOST_BYTES >> 20} MiB; give the config.json, not the weights"
        )
    try:
        with open(file, encoding="utf-8") as opened:
            described = json.load(opened)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model: {_shown(file)} is no JSON ({str(error)[:100]}); mend it, or give another config.json or --params"
        ) from None
    if isinstance(described, dict) and isinstance(described.get("model_type"), str):
        return described
    if isinstance(described, dict) and not described.keys().isdisjoint(_OF_DEEPSPEED):
        raise ConfigError(
            f"--model: {_shown(file)} is a config of DeepSpeed; give it as --config, and the model's config.json here"
        )
    raise ConfigError(
        f"--model: {_shown(file)} names no model_type, as a config.json of transformers does; give one that does, or "
        "--params"
    )


def _require_known(described: dict[str, Any], file: str, transformers: Any) -> None:
    kind = described["model_type"]
    if kind in transformers.CONFIG_MAPPING:
        return
    known = f"--model: transformers {transformers.__version__} does not know the model_type {quoted(kind)}"
    if "auto_map" in described:
        raise ConfigError(f"{known} of {_shown(file)}, and code that comes with a model is not run; give --params")
    raise ConfigError(f"{known} of {_shown(file)}; pip install --upgrade transformers, or give --params")


@contextlib.contextmanager
def _only_errors(transformers: Any) -> Iterator[None]:
    """Its warnings are about weights and tokens, of which a plan has none."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def _class_of(config: Any, transformers: Any) -> Any:
    """What builds the model: the class that the file names, otherwise the first that there is for its type."""
    named = getattr(config, "architectures", None)
    for name in named if isinstance(named, list) else ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for task in _TASKS:
        classes = getattr(transformers, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in classes:
            return classes[type(config)]
    return partial(transformers.AutoModel.from_config, trust_remote_code=False)


def _notes(described: dict[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    """What a reader must know of the count."""
    quantized = described.get("quantization_config")
    if isinstance(quantized, dict) and quantized:
        method = quoted(str(quantized.get("quant_method", "it does not say how")))
        yield f"the weights are quantized ({method}); counted: all train, unquantized. Of an adapter, give --params."
    towers = sum(numel for name, numel in sizes.items() if _TOWER.search(name))
    if towers:
        yield f"{towers:,} of the parameters are for images or sound; if they stay frozen, give --params of the others."


def _share(config: Any) -> float:
    """The share of the experts to which a token is sent; 1: the file does not say."""
    text = getattr(config, "text_config", config)
    experts = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
    chosen = next((getattr(text, name) for name in _CHOSEN if getattr(text, name, None)), 0)
    return min(1.0, chosen / experts) if experts and chosen else 1.0
