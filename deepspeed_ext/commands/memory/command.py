"""Runs ``deepspeed-ext plan --memory``. Imports DeepSpeed only if there is a config."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

from deepspeed_ext.commands.memory.parts import Capacity
from deepspeed_ext.commands.memory.plan import neighbours, plan_memory, usual_setups
from deepspeed_ext.commands.memory.report import as_json, as_text
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, typical_largest
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.host_memory import total_host_bytes
from deepspeed_ext.runtime.log import quoted

__all__ = ["parse_gib", "parse_numel", "run_from_cli"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MOST_PARAMS = 10**15
HERE = "here"
"""Given in place of GiB: use this machine's memory."""
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_numel(text: str) -> int:
    """Read a number of parameters such as ``7e9``, ``7B``, ``1.5b``, ``124M`` or ``7000000000``.

    Raises:
        ValueError: it is not a whole number from 1 to `MOST_PARAMS`.
    """
    found = re.fullmatch(r"([0-9]{1,18})(?:\.([0-9]{1,12}))?(?:[eE]\+?([0-9]{1,2}))?([KMBGTkmbgt]?)", text, re.ASCII)
    if found is not None:
        whole, part, exponent, suffix = found[1], found[2] or "", int(found[3] or 0), found[4].upper()
        numel, rest = divmod(int(whole + part) * 10**exponent * _FACTORS[suffix], 10 ** len(part))
        if rest == 0 and 1 <= numel <= MOST_PARAMS:
            return numel
    raise ValueError(f"expected a number of parameters from 1 to 1e15, such as 7e9, 7B or 124M, got {quoted(text)}")


def run_from_cli(arguments: Any) -> str:
    """The report for the parsed arguments.

    Raises:
        ConfigError: arguments or config contradict each other.
    """
    model, ranks, setup, notes = _read(arguments)
    if model.largest > model.params:
        raise ConfigError(f"--largest-param {model.largest:,} is more than --params {model.params:,}")
    if ranks.per_host > ranks.count:
        raise ConfigError(f"--ranks-per-host {ranks.per_host} is more than --ranks {ranks.count}")
    setups = usual_setups(Setup()) if setup is None else neighbours(setup)
    plans = [plan_memory(model, ranks, each) for each in setups]
    capacity = Capacity(
        _accelerator_bytes() if arguments.accelerator_gib == HERE else _bytes(arguments.accelerator_gib),
        total_host_bytes() if arguments.host_gib == HERE else _bytes(arguments.host_gib),
    )
    if arguments.json:
        return json.dumps(as_json(plans, capacity))
    return as_text(None if setup is None else plans[0], plans, notes, capacity)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _accelerator_bytes() -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed_ext.runtime.backend import get_accelerator

        accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        raise ConfigError("--accelerator-gib here: this machine has no accelerator; give its GiB as a number")
    return int(accelerator.total_memory())


def parse_gib(text: str) -> float | str:
    """Read GiB of memory, or `HERE`.

    Raises:
        ValueError: it is neither.
    """
    if text == HERE:
        return text
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text, re.ASCII) and float(text) > 0:
        return float(text)
    raise ValueError(f"expected GiB, such as 80 or 15.5, or {HERE}, got {quoted(text)}")


def _read(arguments: Any) -> tuple[Model, Ranks, Setup | None, tuple[str, ...]]:
    """The model, the ranks, the run described by the config, and notes on it."""
    count = arguments.ranks
    ranks = Ranks(count, arguments.ranks_per_host or count)
    dtype, setup, notes = "bfloat16", None, tuple[str, ...]()
    if arguments.config is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's logger would write into the report
            from deepspeed_ext.commands.memory.config_file import read_config

            found = read_config(arguments.config, count)
        dtype, setup, notes = found.dtype, found.setup, found.notes
    if arguments.dtype is not None:
        dtype = DTYPES[arguments.dtype]
    params = arguments.params
    return Model(params, arguments.largest_param or typical_largest(params), dtype), ranks, setup, notes
