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
from deepspeed_ext.commands.memory.machine import KEPT, RECOMPUTED, machine_of
from deepspeed_ext.commands.memory.model import Model, Shape, read_shape, typical
from deepspeed_ext.commands.memory.plan import Capacity
from deepspeed_ext.commands.memory.report import as_json, as_text, phases_text
from deepspeed_ext.commands.memory.setup import Ranks
from deepspeed_ext.commands.memory.ways import config_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.proc import total_host_bytes

__all__ = ["run_from_cli"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
HERE = "here"
"""Given in place of GiB: use this machine's memory."""


def run_from_cli(arguments: Any) -> str:
    """Return the report for the parsed arguments, after writing the suggested config if ``--write``
    asks for it.

    Raises:
        ConfigError: arguments or config contradict each other.
    """
    _require_consistent(arguments)
    name, shape, notes = _shape(arguments)
    setups, dtype = None, DTYPES[arguments.dtype or "bf16"]
    ranks = Ranks(arguments.ranks, arguments.ranks_per_host or arguments.ranks)
    if arguments.config is not None:
        # DeepSpeed's logger would write into the report
        with contextlib.redirect_stdout(io.StringIO()):
            from deepspeed_ext.commands.memory.config_file import read_config

            read = read_config(arguments.config, ranks.count)
        setups, notes = [read.setup], [*notes, *read.notes]
        dtype = DTYPES[arguments.dtype] if arguments.dtype else read.dtype
    params = arguments.params or shape.params
    model = Model(params, min(params, arguments.largest_param or shape.largest), dtype)
    question, assumed, more = _question(arguments, shape, model, ranks)
    notes, found = [*notes, *more], fits(question, setups)
    if arguments.json:
        return json.dumps(as_json(question, found, notes))
    text = as_text(name, assumed, question, found, notes, all_ways=bool(arguments.all))
    if setups is not None:
        text = f"{text}\n\n{phases_text(found[0])}"
    if arguments.write is not None:
        best = suggested(found)
        if best is None:
            raise ConfigError("--write: no run fits, or --gpu-gb is missing, so there is none")
        config = config_of(best.setup, dtype, vars(arguments)["for"] or "script")
        try:
            Path(arguments.write).write_text(f"{json.dumps(config, indent=2)}\n")
        except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
            raise ConfigError(f"--write {arguments.write!r} cannot be written: {error}") from None
        text = f"{text}\nIts config is in {arguments.write}."
    return text


def _require_consistent(arguments: Any) -> None:
    given = {name for name, value in vars(arguments).items() if value}
    wrong = {
        "--params and --model: give only one": {"params", "model"} <= given,
        "--largest-param: not with --model, which has it": {"largest_param", "model"} <= given,
        "--largest-param is more than --params": arguments.params
        and (arguments.largest_param or 0) > arguments.params,
        "--ranks-per-host is more than --ranks": (arguments.ranks_per_host or 0) > arguments.ranks,
        "--write: not with --config, which names one run": {"write", "config"} <= given,
        "--all: not with --config, which names one run": {"all", "config"} <= given,
        "--for: only with --write": "for" in given and "write" not in given,
    }
    for problem, is_given in wrong.items():
        if is_given:
            raise ConfigError(problem)


def _shape(arguments: Any) -> tuple[str, Shape, list[str]]:
    if arguments.model is not None:
        return read_shape(arguments.model)
    typically = "activations and the largest parameter are those of a model like Llama 3"
    return "A model", typical(arguments.params), [f"{typically}; --model has yours"]


def _question(
    arguments: Any, shape: Shape, model: Model, ranks: Ranks
) -> tuple[Question, str, list[str]]:
    """What is asked, what is assumed of the machine, and notes on it."""
    gpu, host = arguments.accelerator_gib, arguments.host_gib
    gpu, notes = _accelerator_here() if gpu == HERE else (gpu, [])
    given = None if gpu is None else int(gpu * (1 << 30))
    machine, of_card, assumed = machine_of(arguments.card, arguments.host, given)
    speeds = {
        "link": (arguments.link_gbps, 1e9),
        "host": (arguments.host_gbps, 1e9),
        "of_rank": (arguments.host_gbps, 1e9),
        "flops": (arguments.tflops, 1e12),
    }
    found = {name: value * unit for name, (value, unit) in speeds.items() if value is not None}
    per_token = KEPT if arguments.keep_activations else RECOMPUTED
    if host is not None:
        host = total_host_bytes() if host == HERE else int(host * (1 << 30))
    sequence = arguments.seq_len or Question.sequence
    question = Question(
        shape,
        model,
        ranks,
        Capacity(of_card if given is None and arguments.card else given, host),
        replace(machine, per_token=per_token, **found),
        arguments.tokens or max(Question.tokens, sequence),
        sequence,
        fused_loss=bool(arguments.fused_loss),
    )
    return question, assumed, notes


def _accelerator_here() -> tuple[float, list[str]]:
    """GiB of this machine's accelerator, and a note if it has no memory of its own."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed_ext.runtime.backend import (
            SHARED_MEMORY,
            get_accelerator,
            has_host_memory,
        )

        accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        raise ConfigError("--gpu-gb here: this machine has no accelerator; give its GiB")
    shared = f"this accelerator's memory is the host's, so offload frees nothing: {SHARED_MEMORY}"
    return accelerator.total_memory() / (1 << 30), [shared] if has_host_memory() else []
