"""Runs ``deepspeed-ext plan --memory``. Imports DeepSpeed only if there is a config, torch only if
there is a model."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from typing import Any

from deepspeed_ext.commands.memory import fit_report
from deepspeed_ext.commands.memory.fit import Fit, Question, fits, suggested
from deepspeed_ext.commands.memory.fit_config import Reader, config_of
from deepspeed_ext.commands.memory.model_file import ModelFile, read_model
from deepspeed_ext.commands.memory.plan import Capacity, neighbours, plan_memory
from deepspeed_ext.commands.memory.report import as_json, as_text
from deepspeed_ext.commands.memory.setup import Model, Ranks, typical_largest
from deepspeed_ext.commands.memory.traffic import Machine
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.output_file import OutputFile
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
    _require_one_model(arguments)
    written = None if arguments.write is None else OutputFile.check(arguments.write, "--write")
    named = _model(arguments)
    ranks = Ranks(arguments.ranks, arguments.ranks_per_host or arguments.ranks)
    if named.largest > named.params:
        raise ConfigError(
            f"--largest-param {named.largest:,} is more than --params {named.params:,}"
        )
    if ranks.per_host > ranks.count:
        raise ConfigError(f"--ranks-per-host {ranks.per_host} is more than --ranks {ranks.count}")
    capacity = Capacity(
        _accelerator_bytes()
        if arguments.accelerator_gib == HERE
        else _bytes(arguments.accelerator_gib),
        total_host_bytes() if arguments.host_gib == HERE else _bytes(arguments.host_gib),
    )
    if arguments.accelerator_gib == HERE:
        named = replace(named, notes=(*named.notes, *_notes_of_this_machine()))
    machine = _machine(arguments)
    if arguments.config is not None:
        return _of_config(arguments, named, ranks, capacity)
    model = Model(named.params, named.largest, DTYPES[arguments.dtype or "bf16"])
    question = Question(model, ranks, capacity, machine, named.active or named.params)
    if arguments.tokens is not None:
        question = replace(question, tokens=arguments.tokens)
    found = fits(question)
    wrote = None if written is None else _write(written, found, vars(arguments)["for"] or "script")
    if arguments.json:
        report = as_json([fit.plan for fit in found], capacity, named.notes)
        return json.dumps(report | fit_report.as_json(question, found))
    text = fit_report.as_text(
        named.name, question, found, named.notes, all_ways=bool(arguments.all)
    )
    return text if wrote is None else f"{text}\n{wrote}"


def _require_one_model(arguments: Any) -> None:
    if arguments.params is not None and arguments.model is not None:
        raise ConfigError(
            "--params and --model: give only one; --model has the number of parameters"
        )
    if arguments.model is not None and arguments.largest_param is not None:
        raise ConfigError("--largest-param: not with --model, which has it")
    if arguments.config is not None:
        for name in ("write", "tokens", "all"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name}: not with --config, which names one run to plan")
    if vars(arguments)["for"] is not None and arguments.write is None:
        raise ConfigError("--for: only with --write")


def _model(arguments: Any) -> ModelFile:
    """The model of ``--model``, or one of ``--params`` parameters."""
    if arguments.model is not None:
        return read_model(arguments.model)
    params = arguments.params
    return ModelFile("A model", params, arguments.largest_param or typical_largest(params), params)


def _machine(arguments: Any) -> Machine:
    given = {
        "link": (arguments.link_gbps, 1e9),
        "host": (arguments.host_gbps, 1e9),
        "flops": (arguments.tflops, 1e12),
    }
    return replace(
        Machine(),
        **{name: value * unit for name, (value, unit) in given.items() if value is not None},
    )


def _write(file: OutputFile, found: list[Fit], reader: Reader) -> str:
    best = suggested(found)
    if best is None:
        raise ConfigError(
            "--write: there is no config to write, because no run fits, or --gpu-gb or --host-gb "
            "is missing"
        )
    dtype = best.plan.model.dtype
    file.write(f"{json.dumps(config_of(best.setup, dtype, reader), indent=2)}\n".encode())
    return f"Its config is in {file.path}, {_READ_BY[reader]}."


_READ_BY: dict[Reader, str] = {
    "script": "for deepspeed.initialize; --for trainer writes one for the Hugging Face Trainer",
    "trainer": "for a trainer, whose arguments set batch sizes, learning rate and dtype",
}


def _of_config(arguments: Any, named: ModelFile, ranks: Ranks, capacity: Capacity) -> str:
    """The report on the run that ``--config`` names."""
    # DeepSpeed's logger would write into the report
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed_ext.commands.memory.config_file import read_config

        read = read_config(arguments.config, ranks.count)
    model = Model(
        named.params, named.largest, DTYPES[arguments.dtype] if arguments.dtype else read.dtype
    )
    plans = [plan_memory(model, ranks, each, capacity) for each in neighbours(read.setup)]
    notes = (*named.notes, *read.notes)
    if arguments.json:
        return json.dumps(as_json(plans, capacity, notes))
    return as_text(plans, notes, capacity)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _accelerator_bytes() -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed_ext.runtime.backend import get_accelerator

        accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        raise ConfigError(
            "--accelerator-gib here: this machine has no accelerator; give its GiB as a number"
        )
    return int(accelerator.total_memory())


def _notes_of_this_machine() -> list[str]:
    from deepspeed_ext.runtime.backend import SHARED_MEMORY, shares_host_memory

    if not shares_host_memory():
        return []
    return [f"this accelerator's memory is the host's, so offload frees nothing: {SHARED_MEMORY}"]
