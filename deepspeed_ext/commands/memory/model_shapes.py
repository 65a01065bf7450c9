"""Builds the model of a config on the meta device, in a process of its own. Imports transformers.

The process reads the parsed config from its standard input, and writes what `answer` returns to its
standard output.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from functools import partial
from typing import Any

from deepspeed_ext.commands.memory.model_references import require_inert
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.confined import confine
from deepspeed_ext.runtime.words import quoted

__all__ = ["answer"]

_CPU_SECONDS = 60.0
"""For building one model; the largest public ones take 15."""
_BYTES = 4 << 30
_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
"""What a model of a type is for, if its file names no class."""
_TOWER = re.compile(r"(^|[._])(vision|visual|image|audio|speech)")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def main() -> None:
    """Answer for the config on standard input, confined."""
    answers = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not garble the answer
    described = json.load(sys.stdin)
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except Exception as error:  # a broken installation raises more than ImportError
        found: dict[str, Any] = {"absent": str(error)[:300]}
    else:
        confine(_CPU_SECONDS, _BYTES)
        found = answer(described)
    with open(answers, "w", encoding="utf-8") as file:
        file.write(json.dumps(found))


def answer(described: dict[str, Any]) -> dict[str, Any]:
    """Count the parameters of the model that `described`, an inert config, describes.

    Returns:
        The class's ``name``, and ``params``, ``largest``, ``active`` and ``towers`` (parameters for
        images and sound) in elements. Or, if that fails, ``problem``, ``change`` (what to do) and
        ``is_unknown`` (whether transformers does not know the type).
    """
    import transformers

    here, kind = f"transformers {transformers.__version__}", described["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        problem = f"{here} does not know the model_type {quoted(kind)}"
        return {
            "problem": problem,
            "change": "pip install --upgrade transformers",
            "is_unknown": True,
        }
    # warnings are about weights and tokens, of which a plan has none
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _counted(described, transformers)
    except ConfigError as error:
        return {"problem": str(error), "change": "fix it", "is_unknown": False}
    except Exception as error:  # whatever transformers raises for a file that describes no model
        change = "install what it names" if isinstance(error, ImportError) else "fix the file"
        said = " ".join(str(error).split())[:250]
        problem = f"{here} builds no model from it: {type(error).__name__}: {said}"
        return {"problem": problem, "change": change, "is_unknown": False}


def _counted(described: dict[str, Any], transformers: Any) -> dict[str, Any]:
    import torch

    # a copy, because transformers reads files beside a config
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(described, file)
        # Without the last argument it asks at a terminal whether to run code that the file names.
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    # a config class may rename fields, or have a reference by default
    require_inert(config.to_dict())
    with torch.device("meta"):
        model = _class_of(config, transformers)(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if not sizes:
        raise ConfigError("its model has no parameters")
    params = sum(sizes.values())
    experts = sum(numel for name, numel in sizes.items() if _EXPERT.search(name))
    return {
        "name": type(model).__name__,
        "params": params,
        "largest": max(sizes.values()),
        "active": params - round(experts * (1 - _share(config))),
        "towers": sum(numel for name, numel in sizes.items() if _TOWER.search(name)),
    }


def _class_of(config: Any, transformers: Any) -> Any:
    """The class that the file names, otherwise the first that exists for its type."""
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


def _share(config: Any) -> float:
    """The fraction of the experts that a token is routed to; 1 if the file does not say."""
    text = getattr(config, "text_config", config)
    experts = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
    chosen = next((getattr(text, name) for name in _CHOSEN if getattr(text, name, None)), 0)
    return min(1.0, chosen / experts) if experts and chosen else 1.0
