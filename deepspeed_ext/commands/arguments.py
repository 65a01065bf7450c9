"""The commands and their options, as tables, and the types of their values. Without torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from deepspeed_ext import __version__
from deepspeed_ext.runtime.log import quoted

__all__ = ["COMMANDS", "CORES", "EXIT_BAD_INPUT", "MEMORY", "numel", "options_of", "parser"]

EXIT_BAD_INPUT = 2
# Larger than any real value, but far too small to exhaust memory or overflow to infinity.
MAX_RANKS, MAX_CORES = 1024, 1 << 16
MAX_JOB_RANKS, MAX_TOKENS, MAX_PARAMS = 1 << 20, 1 << 40, 10**15
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def bounded(
    kind: type[int] | type[float], least: float, most: float, expected: str
) -> Callable[[str], Any]:
    """Return an argument type: a number within bounds."""

    def parse(text: str) -> int | float:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")

    return parse


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return an argument type: a whole number from `least` to `most`."""
    return bounded(int, least, most, f"a whole number from {least} to {most}")


positive = bounded(float, 1e-6, 1e9, "a number above 0, such as 55 or 25.6")
"""In its argument's unit. Of memory: vendors write GB and mean GiB."""
_fraction = bounded(
    float, 1e-6, 1 - 1e-6, "a count of cores (1, 2, ...) or a fraction between 0 and 1"
)


def reserved_cores(text: str) -> int | float:
    """A number of cores, or a fraction of them below 1."""
    return whole(1, MAX_CORES)(text) if text.isdecimal() else _fraction(text)


def numel(text: str) -> int:
    """A number of parameters such as ``7e9``, ``7B``, ``1.5b``, ``124M`` or ``7000000000``."""
    if found := re.fullmatch("([0-9.e+]{1,40})([KMBGT]?)", text, re.ASCII | re.IGNORECASE):
        with suppress(ArithmeticError):
            value = Decimal(found[1]) * _FACTORS[found[2].upper()]
            if 1 <= value <= MAX_PARAMS and value == int(value):
                return int(value)
    raise argparse.ArgumentTypeError(
        "expected a number of parameters from 1 to 1e15, "
        f"such as 7e9, 7B or 124M, got {quoted(text)}"
    )


def node(text: str) -> int | None:
    """The number of a NUMA node; -1 or ``none``: None."""
    return None if text in ("-1", "none") else whole(0, MAX_CORES)(text)


Options = Mapping[str, tuple[Any, str]]
"""By the names of an option and of its value, the value's type, or its choices, or what argparse is
told; and the help."""
_FLAG: dict[str, Any] = {"action": "store_const", "const": True}
_PLACE = {"type": str, "action": "append"}
_COUNT, _TOKENS = whole(1, MAX_RANKS), whole(1, MAX_TOKENS)
_CARDS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200")

CORES: Options = {
    "--root DIR": (str, "directory that holds sys/ and proc/ [/]"),
    "--allowed LIST": (_PLACE, "CPUs of a local rank, such as 0,4-11; repeat per rank"),
    "--gpu-node N": (
        {"type": node, "action": "append"},
        "NUMA node of a local rank's accelerator, or none; repeat per rank",
    ),
    "--pt-reserved-cores X": (
        reserved_cores,
        "cores per rank kept for PyTorch: a count, or a fraction between 0 and 1 "
        "[an eighth, 2 to 4]",
    ),
    "--optimizer-cores K": (whole(1, MAX_CORES), "cores per rank for the optimizer [the rest]"),
    "--on-cpu": (
        _FLAG,
        "plan for training on the CPU: PyTorch keeps half [if DS_ACCELERATOR is cpu]",
    ),
}
"""Options of ``plan`` for cores alone."""

MEMORY: Options = {
    "--params P": (numel, "parameters, such as 7e9, 7B or 124M"),
    "--model PATH": (str, "a transformers config.json, its folder, or a name such as qwen2.5-7b"),
    "--ranks --gpus N": (whole(1, MAX_JOB_RANKS), "data-parallel ranks"),
    "--ranks-per-host --gpus-per-host N": (_COUNT, "ranks that share a host [all of them]"),
    "--config FILE": (str, "plan this DeepSpeed config [a table of all ways]"),
    "--dtype": (("bf16", "fp16", "fp32"), "dtype of the weights [the config's, or bf16]"),
    "--card": (_CARDS, "memory and speeds of this card [by --gpu-gb]"),
    "--host": (("desktop", "server"), "speed of the host's memory [the card's]"),
    "--accelerator-gib --gpu-gb G": (positive, "GiB of one accelerator [unknown]"),
    "--host-gib --host-gb G": (positive, "GiB of one host [unknown]"),
    "--link-gbps X": (positive, "GB/s between a GPU and its host, each way [the card's]"),
    "--host-gbps X": (positive, "GB/s of a host's memory [the host's]"),
    "--tflops X": (positive, "TFLOP/s that a GPU sustains [the card's]"),
    "--tokens N": (_TOKENS, "tokens per GPU and optimizer step [8192]"),
    "--seq-len N": (_TOKENS, "tokens per GPU whose activations are held at once [4096]"),
    "--fused-loss": (_FLAG, "the loss makes no logits of all tokens (use_liger_kernel) [no]"),
    "--keep-activations": (_FLAG, "activations are not recomputed in backward [no]"),
    "--all": (_FLAG, "show every way, not the best of each kind [no]"),
    "--write FILE": (str, "write the config of the suggested run"),
    "--for": (
        ("script", "trainer"),
        "with --write: for deepspeed.initialize, or for the Hugging Face Trainer [script]",
    ),
}
"""Options of ``plan`` for memory alone."""


class Command(NamedTuple):
    """A command: what it does, a command line for the end of its --help, and its options."""

    help: str
    example: str
    options: Options


COMMANDS = {
    "doctor": Command(
        "check whether this machine can run each part, and what is missing",
        "deepspeed-ext doctor",
        {"--json": (_FLAG, "print JSON")},
    ),
    "config": Command(
        "list the ready configs, or print one of them",
        "deepspeed-ext config trainer_zenflow > ds.json",
        {"name NAME": ({"nargs": "?"}, "a config's name, or schema [list them]")},
    ),
    "plan": Command(
        "show which CPU cores each rank gets; with --memory, how much memory a run needs",
        "deepspeed-ext plan --memory --params 7e9 "
        "--gpus 1 --gpu-gb 24 --host-gb 128 --write ds.json",
        {
            **CORES,
            "--json": (_FLAG, "print JSON"),
            "--memory": (_FLAG, "plan memory instead of cores"),
            **{name: (how, f"with --memory: {words}") for name, (how, words) in MEMORY.items()},
        },
    ),
    "verify": Command(
        "train a small model with a config and with plain AdamW, and compare the two",
        "deepspeed-ext verify --config ds.json",
        {
            "--config FILE": ({"type": str, "required": True}, "DeepSpeed config to check"),
            "--ranks N": (_COUNT, "processes [number of accelerators, or 2 without]"),
            "--steps N": (whole(4, 1000), "optimizer steps [as needed]"),
            "--timeout S": (
                {"type": whole(1, 24 * 3600), "default": 600},
                "seconds for all of it [600]",
            ),
            "--json": (_FLAG, "print JSON"),
        },
    ),
    "run": Command(
        "run an unchanged training script with the extension enabled",
        "deepspeed-ext run train.py --lr 1e-4",
        {"script SCRIPT": ({}, ""), "arguments ARGS": ({"nargs": argparse.REMAINDER}, "")},
    ),
}


def options_of(options: Options) -> set[str]:
    """Names of the values that argparse makes of some options."""
    return {names.split()[0].removeprefix("--").replace("-", "_") for names in options}


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one line on stderr, with exit status 2; --help shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    of_all = _Parser(
        prog="deepspeed-ext", description="Tools of the deepspeed_ext package.", allow_abbrev=False
    )
    of_all.add_argument("--version", action="version", version=__version__)
    commands = of_all.add_subparsers(dest="verb", required=True, metavar=" | ".join(COMMANDS))
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            epilog=f"example: {command.example}",
            # it does not break the lines of the example
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for words, (how, meaning) in command.options.items():
            names = [word for word in words.split() if not word.isupper()]
            kind: dict[str, Any] = {"choices": how} if isinstance(how, tuple) else {"type": how}
            kind = dict(how) if isinstance(how, dict) else kind
            if len(names) < len(words.split()):
                kind["metavar"] = words.split()[-1]
            argument = added.add_argument(*names, help=meaning or None, **kind)
            if kind.get("nargs") == argparse.REMAINDER:
                argument.required = False  # as it is; argparse of Python 3.10 and 3.11 has True
    return of_all
