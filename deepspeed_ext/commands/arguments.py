"""The commands and their options, as tables, and the types of their values. Without torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from deepspeed_ext import __version__
from deepspeed_ext.runtime.log import quoted

__all__ = ["COMMANDS", "CORES", "EXIT_BAD_INPUT", "MEMORY", "numel", "options_of", "parser"]

EXIT_BAD_INPUT = 2
# Larger than any real value, but far too small to exhaust memory or overflow to infinity.
MAX_RANKS, MAX_CORES = 1024, 1 << 16
MAX_JOB_RANKS, MAX_TOKENS, MAX_PARAMS = 1 << 20, 1 << 40, 10**15
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return an argument type: a whole number from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if re.fullmatch("[0-9]{1,18}", text) is None or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {minimum} to {maximum}, got {quoted(text)}"
            )
        return int(text)

    return parse


def numel(text: str) -> int:
    """A number of parameters such as ``7e9``, ``7B``, ``1.5b``, ``124M`` or ``7000000000``."""
    found = re.fullmatch(
        r"([0-9]{1,18})(?:\.([0-9]{1,12}))?(?:[eE]\+?([0-9]{1,2}))?([KMBGTkmbgt]?)", text, re.ASCII
    )
    if found is not None:
        digits, part = found[1], found[2] or ""
        factor = 10 ** int(found[3] or 0) * _FACTORS[found[4].upper()]
        value, rest = divmod(int(digits + part) * factor, 10 ** len(part))
        if rest == 0 and 1 <= value <= MAX_PARAMS:
            return value
    raise argparse.ArgumentTypeError(
        "expected a number of parameters from 1 to 1e15, "
        f"such as 7e9, 7B or 124M, got {quoted(text)}"
    )


def speed(text: str, expected: str = "a number above 0, such as 55 or 25.6") -> float:
    """A number above 0 and below 1e9, in its argument's unit."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text, re.ASCII) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")


def gib(text: str) -> float | str:
    """GiB of memory, or ``here``. Vendors write GB and mean GiB."""
    return text if text == "here" else speed(text, "GiB, such as 80 or 15.5, or here")


def reserved_cores(text: str) -> int | float:
    """A number of cores, or a fraction of them below 1."""
    if text.isdecimal():
        return whole(1, MAX_CORES)(text)
    expected = "a count of cores (1, 2, ...) or a fraction between 0 and 1"
    if (value := speed(text, expected)) < 1:
        return value
    raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")


def node(text: str) -> int | None:
    """The number of a NUMA node; -1 or ``none``: None."""
    return None if text in ("-1", "none") else whole(0, MAX_CORES)(text)


Options = Mapping[str, tuple[str, dict[str, Any]]]
"""By the option's names, its help and what argparse is told of it."""
_FLAG: dict[str, Any] = {"action": "store_const", "const": True}
_JSON = {"--json": ("print JSON", {"action": "store_true"})}


def _value(metavar: str, kind: Callable[[str], Any] = str, **how: Any) -> dict[str, Any]:
    return {"metavar": metavar, "type": kind, **how}


CORES: Options = {
    "--root": ("directory that holds sys/ and proc/ [/]", _value("DIR")),
    "--allowed": (
        "CPUs of a local rank, such as 0,4-11; repeat per rank",
        _value("LIST", action="append"),
    ),
    "--gpu-node": (
        "NUMA node of a local rank's accelerator, or none; repeat per rank",
        _value("N", node, action="append"),
    ),
    "--pt-reserved-cores": (
        "cores per rank kept for PyTorch: a count, or a fraction between 0 and 1 "
        "[an eighth, 2 to 4]",
        _value("X", reserved_cores),
    ),
    "--optimizer-cores": (
        "cores per rank for the optimizer [the rest]",
        _value("K", whole(1, MAX_CORES)),
    ),
    "--on-cpu": (
        "plan for training on the CPU: PyTorch keeps half [if DS_ACCELERATOR is cpu]",
        _FLAG,
    ),
}
"""Options of ``plan`` for cores alone."""

_CARDS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200")
_OF_MEMORY: Options = {
    "--params": ("parameters, such as 7e9, 7B or 124M", _value("P", numel)),
    "--model": (
        "a transformers config.json, its folder, or a name such as qwen2.5-7b",
        _value("PATH"),
    ),
    "--ranks --gpus": ("data-parallel ranks", _value("N", whole(1, MAX_JOB_RANKS))),
    "--ranks-per-host --gpus-per-host": (
        "ranks that share a host [all of them]",
        _value("N", whole(1, MAX_RANKS)),
    ),
    "--config": ("plan this DeepSpeed config [a table of all ways]", _value("FILE")),
    "--dtype": (
        "dtype of the weights [the config's, or bf16]",
        {"choices": ("bf16", "fp16", "fp32")},
    ),
    "--largest-param": (
        "elements of the largest parameter [a typical model's]",
        _value("L", numel),
    ),
    "--card": ("memory and speeds of this card [by --gpu-gb]", {"choices": _CARDS}),
    "--host": ("speed of the host's memory [the card's]", {"choices": ("desktop", "server")}),
    "--accelerator-gib --gpu-gb": (
        "GiB of one accelerator, or here for this machine's [unknown]",
        _value("G", gib),
    ),
    "--host-gib --host-gb": (
        "GiB of one host, or here for this machine's [unknown]",
        _value("G", gib),
    ),
    "--link-gbps": (
        "GB/s between a GPU and its host, each way [the card's or host's]",
        _value("X", speed),
    ),
    "--host-gbps": ("GB/s of a host's memory [the card's or host's]", _value("X", speed)),
    "--tflops": ("TFLOP/s that a GPU sustains [the card's or host's]", _value("X", speed)),
    "--tokens": (
        "tokens per GPU and optimizer step [8192]",
        _value("N", whole(1, MAX_TOKENS)),
    ),
    "--seq-len": (
        "tokens per GPU whose activations are held at once [4096]",
        _value("N", whole(1, MAX_TOKENS)),
    ),
    "--fused-loss": ("the loss makes no logits of all tokens (use_liger_kernel) [no]", _FLAG),
    "--keep-activations": ("activations are not recomputed in backward [no]", _FLAG),
    "--all": ("show every way, not the best of each kind [no]", _FLAG),
    "--write": ("write the config of the suggested run", _value("FILE")),
    "--for": (
        "with --write: for deepspeed.initialize, or for the Hugging Face Trainer [script]",
        {"choices": ("script", "trainer")},
    ),
}
MEMORY: Options = {
    names: (f"with --memory: {words}", how) for names, (words, how) in _OF_MEMORY.items()
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
        _JSON,
    ),
    "config": Command(
        "list the ready configs, or print one of them",
        "deepspeed-ext config trainer_zenflow > ds.json",
        {"name": ("a config's name, or schema [list them]", {"metavar": "NAME", "nargs": "?"})},
    ),
    "plan": Command(
        "show which CPU cores each rank gets; with --memory, how much memory a run needs",
        "deepspeed-ext plan --memory --params 7e9 "
        "--gpus 1 --gpu-gb 24 --host-gb 128 --write ds.json",
        {
            **CORES,
            **_JSON,
            "--memory": ("plan memory instead of cores", {"action": "store_true"}),
            **MEMORY,
        },
    ),
    "verify": Command(
        "train a small model with a config and with plain AdamW, and compare the two",
        "deepspeed-ext verify --config ds.json",
        {
            "--config": ("DeepSpeed config to check", _value("FILE", required=True)),
            "--ranks": (
                "processes [number of accelerators, or 2 without]",
                _value("N", whole(1, MAX_RANKS)),
            ),
            "--steps": ("optimizer steps [as needed]", _value("N", whole(4, 1000))),
            "--timeout": (
                "seconds for all of it [600]",
                _value("S", whole(1, 24 * 3600), default=600),
            ),
            **_JSON,
        },
    ),
    "run": Command(
        "run an unchanged training script with the extension enabled",
        "deepspeed-ext run train.py --lr 1e-4",
        {
            "script": ("", {"metavar": "SCRIPT"}),
            "arguments": ("", {"metavar": "ARGS", "nargs": argparse.REMAINDER}),
        },
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
        for names, (words, how) in command.options.items():
            argument = added.add_argument(*names.split(), help=words or None, **how)
            if how.get("nargs") == argparse.REMAINDER:
                argument.required = False  # as it is; argparse of Python 3.10 and 3.11 has True
    return of_all
