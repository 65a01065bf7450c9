"""Runs ``deepspeed-ext plan --memory``. Imports DeepSpeed only if there is a config, and never
torch."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.commands.memory.fit import Question, fits, suggested
from deepspeed_ext.commands.memory.model import GIB, Model, machine_of, read_shape, typical
from deepspeed_ext.commands.memory.report import as_json, as_text, phases_text
from deepspeed_ext.commands.memory.setup import config_of, read_config
from deepspeed_ext.errors import ConfigError

__all__ = ["run_from_cli"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_TYPICAL = "activations and the largest parameter are those of a model like Llama 3"


def run_from_cli(arguments: Any) -> str:
    """Return the report for the parsed arguments, after writing the suggested config if ``--write``
    asks for it.

    Raises:
        ConfigError: arguments or config contradict each other.
    """
    _require_consistent(arguments)
    shape, notes = typical(arguments.params or 1), [f"{_TYPICAL}; --model has yours"]
    if arguments.model is not None:
        shape, notes = read_shape(arguments.model)
    setups, dtype = None, "bfloat16"
    if arguments.config is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's logger would write into it
            setup, dtype, more = read_config(arguments.config, arguments.ranks)
        setups, notes = [setup], [*notes, *more]
    dtype = DTYPES.get(arguments.dtype, dtype)
    params = arguments.params or shape.params
    question = _question(arguments, shape, Model(params, min(params, shape.largest), dtype))
    found = fits(question, setups)
    if arguments.json:
        return json.dumps(as_json(found, notes))
    text = as_text(found, notes, all_ways=bool(arguments.all))
    if setups is not None:
        text = f"{text}\n\n{phases_text(found[0])}"
    if arguments.write is None:
        return text
    best = suggested(found)
    if best is None:
        raise ConfigError("--write: no run fits, or --gpu-gb is missing, so there is none")
    config = config_of(best.setup, dtype, vars(arguments)["for"] or "script")
    try:
        Path(arguments.write).write_text(f"{json.dumps(config, indent=2)}\n")
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        raise ConfigError(f"--write {arguments.write!r} cannot be written: {error}") from None
    return f"{text}\nIts config is in {arguments.write}."


def _require_consistent(arguments: Any) -> None:
    given = {name for name, value in vars(arguments).items() if value}
    wrong = {
        "--params and --model: give only one": {"params", "model"} <= given,
        "--ranks-per-host is more than --ranks": (arguments.ranks_per_host or 0) > arguments.ranks,
        "--write: not with --config, which names one run": {"write", "config"} <= given,
        "--all: not with --config, which names one run": {"all", "config"} <= given,
        "--for: only with --write": "for" in given and "write" not in given,
    }
    for problem, is_given in wrong.items():
        if is_given:
            raise ConfigError(problem)


def _question(arguments: Any, shape: Any, model: Model) -> Question:
    ranks, sizes = arguments.ranks, (arguments.accelerator_gib, arguments.host_gib)
    gpu, host = (None if gib is None else int(gib * GIB) for gib in sizes)
    per_host = arguments.ranks_per_host or ranks
    machine = machine_of(ranks, per_host, arguments.card, arguments.host, gpu, host)
    if arguments.link_gbps is not None:
        machine = replace(machine, link=arguments.link_gbps * 1e9)
    if arguments.host_gbps is not None:
        machine = replace(
            machine, host=arguments.host_gbps * 1e9, of_rank=arguments.host_gbps * 1e9
        )
    if arguments.tflops is not None:
        machine = replace(machine, flops=arguments.tflops * 1e12)
    sequence = arguments.seq_len or Question.sequence
    return Question(
        shape,
        model,
        machine,
        arguments.tokens or max(Question.tokens, sequence),
        sequence,
        recomputed=not arguments.keep_activations,
        fused_loss=bool(arguments.fused_loss),
    )
