"""Counts the parameters of a Hugging Face ``config.json``, by shapes on the meta device. Imports transformers.

No weights are read or made, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.errors import ConfigError, UnsupportedError

__all__ = ["ModelFile", "read_model"]

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
    """

    name: str
    params: int
    largest: int
    active: int


def read_model(path: str) -> ModelFile:
    """Count the parameters of the model that `path`, a ``config.json`` or a folder with one, describes.

    Raises:
        ConfigError: there is no such file, or transformers builds no model from it.
        UnsupportedError: transformers is missing.
    """
    file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    if "\0" in path or len(path) > os.pathconf("/", "PC_PATH_MAX") or not file.is_file():
        raise ConfigError(
            f"--model: found no config.json at {path[:200]!r}; give the file, or the folder that holds it"
        )
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"--model needs transformers ({error}): pip install 'deepspeed-ext[transformers]', or give --params"
        ) from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
            with torch.device("meta"):
                model = _class_of(config, transformers)(config)
    except Exception as error:  # whatever transformers raises for a file that describes no model
        raise ConfigError(
            f"--model: transformers {transformers.__version__} builds no model from {str(file)[:200]}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if not sizes:
        raise ConfigError(f"--model: the model of {str(file)[:200]} has no parameters")
    params = sum(sizes.values())
    experts = sum(numel for name, numel in sizes.items() if _EXPERT.search(name))
    return ModelFile(type(model).__name__, params, max(sizes.values()), params - round(experts * (1 - _share(config))))


def _class_of(config: Any, transformers: Any) -> Any:
    """What builds the model: the class that the file names, otherwise the language model of its type."""
    for name in getattr(config, "architectures", None) or ():
        if isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM.from_config


def _share(config: Any) -> float:
    """The share of the experts to which a token is sent; 1: the file does not say."""
    text = getattr(config, "text_config", config)
    experts = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
    chosen = next((getattr(text, name) for name in _CHOSEN if getattr(text, name, None)), 0)
    return min(1.0, chosen / experts) if experts and chosen else 1.0
