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
        setups, notes = [read.setup], (*notes, *read.notes)
        dtype = DTYPES[arguments.dtype] if arguments.dtype else read.dtype
    model = Model(arguments.params or shape.params, arguments.largest_param or shape.largest, dtype)
    model = replace(model, largest=min(model.params, model.largest))
    question, assumed = _question(arguments, shape, model, ranks)
    if arguments.accelerator_gib == HERE:
        notes = (*notes, *_notes_of_this_machine())
    found = fits(question, setups)
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
    wrong = {
        "--params and --model: give only one": arguments.params and arguments.model,
        "--largest-param: not with --model, which has it": arguments.largest_param
        and arguments.model,
        "--largest-param is more than --params": arguments.params
        and (arguments.largest_param or 0) > arguments.params,
        "--ranks-per-host is more than --ranks": (arguments.ranks_per_host or 0) > arguments.ranks,
        "--write: not with --config, which names one run": arguments.write and arguments.config,
        "--all: not with --config, which names one run": arguments.all and arguments.config,
        "--for: only with --write": vars(arguments)["for"] and not arguments.write,
    }
    for problem, is_given in wrong.items():
        if is_given:
            raise ConfigError(problem)


def _shape(arguments: Any) -> tuple[str, Shape, tuple[str, ...]]:
    if arguments.model is not None:
        return read_shape(arguments.model)
    note = (
        "activations and the largest parameter are those of a model like Llama 3; --model has yours"
    )
    return "A model", typical(arguments.params), (note,)


def _question(arguments: Any, shape: Shape, model: Model, ranks: Ranks) -> tuple[Question, str]:
    given = _accelerator_bytes(arguments.accelerator_gib)
    machine, of_card, assumed = machine_of(arguments.card, arguments.host, given)
    speeds = {
        "link": (arguments.link_gbps, 1e9),
        "host": (arguments.host_gbps, 1e9),
        "of_rank": (arguments.host_gbps, 1e9),
        "flops": (arguments.tflops, 1e12),
    }
    found = {name: value * unit for name, (value, unit) in speeds.items() if value is not None}
    per_token = KEPT if arguments.keep_activations else RECOMPUTED
    host = arguments.host_gib
    capacity = Capacity(
        of_card if given is None and arguments.card else given,
        total_host_bytes() if host == HERE else _bytes(host),
    )
    sequence = arguments.seq_len or Question.sequence
    return Question(
        shape,
        model,
        ranks,
        capacity,
        replace(machine, per_token=per_token, **found),
        arguments.tokens or max(Question.tokens, sequence),
        sequence,
        fused_loss=bool(arguments.fused_loss),
    ), assumed


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _accelerator_bytes(gib: Any) -> int | None:
    if gib != HERE:
        return _bytes(gib)
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed_ext.runtime.backend import get_accelerator

        accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        raise ConfigError("--gpu-gb here: this machine has no accelerator; give its GiB")
    return int(accelerator.total_memory())


def _notes_of_this_machine() -> list[str]:
    from deepspeed_ext.runtime.backend import SHARED_MEMORY, has_host_memory

    if not has_host_memory():
        return []
    return [f"this accelerator's memory is the host's, so offload frees nothing: {SHARED_MEMORY}"]
