"""The command line: ``deepspeed-ext doctor, config, plan, verify, run``.

Each command imports what it needs when it runs, so ``plan`` does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from deepspeed_ext import __version__
from deepspeed_ext.errors import ConfigError, DeepSpeedExtError, UnsupportedError
from deepspeed_ext.runtime.log import quoted

EXIT_PROBLEM, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_UNREAD = 1, 2, 128 + 2, 128 + 13
_PACKAGE = Path(__file__).resolve().parent.parent
_CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""The ready-made configs and the editor schema: a wheel has them inside the package (setup.py)."""


# Larger than any real value, but far too small to exhaust memory or overflow to infinity.
MAX_RANKS, MAX_JOB_RANKS = 1024, 1 << 20
MAX_TOKENS, MAX_PARAMS = 1 << 40, 10**15
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def bounded(
    kind: type[int] | type[float], least: float, most: float, expected: str
) -> Callable[[str], Any]:
    """Return an argument type: a number within bounds."""

    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")

    return parse


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return an argument type: a whole number from `least` to `most`."""
    return bounded(int, least, most, f"a whole number from {least} to {most}")


positive = bounded(float, 1e-6, 1e9, "a number from 1e-6 to 1e9, such as 55")
"""In its argument's unit. Of memory: vendors write GB and mean GiB."""


def numel(text: str) -> int:
    """A number of parameters such as ``7e9``, ``7B``, ``1.5b``, ``124M`` or ``7000000000``."""
    if found := re.fullmatch("([0-9.e+]{1,40})([KMBGT]?)", text, re.ASCII | re.IGNORECASE):
        with contextlib.suppress(ArithmeticError):
            value = Decimal(found[1]) * _FACTORS[found[2].upper()]
            if 1 <= value <= MAX_PARAMS and value == int(value):
                return int(value)
    raise argparse.ArgumentTypeError(
        "expected a number of parameters from 1 to 1e15, "
        f"such as 7e9, 7B or 124M, got {quoted(text)}"
    )


Options = Mapping[str, tuple[Any, str]]
"""By the names of an option and of its value, the value's type, or its choices, or what argparse is
told; and the help."""
_FLAG: dict[str, Any] = {"action": "store_const", "const": True}
_COUNT, _TOKENS = whole(1, MAX_RANKS), whole(1, MAX_TOKENS)
_CARDS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200")

MEMORY: Options = {
    "--params P": (numel, "parameters, such as 7e9, 7B or 124M"),
    "--model PATH": (str, "a transformers config.json, its folder, or a name such as qwen2.5-7b"),
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
    """What a command does, a command line for the end of its --help, and its options."""

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
            "--ranks --gpus N": (
                whole(1, MAX_JOB_RANKS),
                "data-parallel ranks; for cores those of this host [its NVIDIA GPUs, or 1]",
            ),
            "--on-cpu": (
                _FLAG,
                "plan cores for training on the CPU: PyTorch keeps half [if DS_ACCELERATOR is cpu]",
            ),
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


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one line on stderr, with exit status 2; --help shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser() -> argparse.ArgumentParser:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a problem, 2 for bad input, 130 (as if
    killed by SIGINT) after Ctrl-C, 141 (by SIGPIPE) if the reader of its output has gone."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    if arguments.verb == "run":  # argparse would drop a first --
        arguments.arguments = words[words.index(arguments.script, 1) + 1 :]
    commands = {"doctor": _doctor, "config": _config, "plan": _plan, "verify": _verify}
    try:
        status = commands.get(arguments.verb, _prepare_run)(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # otherwise Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except (ConfigError, UnsupportedError, ValueError) as error:
        return _report_error(arguments, error, EXIT_BAD_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "deepspeed_ext"):  # our own mistake
            raise
        hint = (
            f"{error} of {sys.executable}: install it there; deepspeed-ext doctor shows what else"
        )
        return _report_error(arguments, UnsupportedError(f"{hint} is missing"), EXIT_PROBLEM)
    except (DeepSpeedExtError, OSError) as error:
        return _report_error(arguments, error, EXIT_PROBLEM)
    except KeyboardInterrupt:  # as a rule while torch is imported
        return EXIT_INTERRUPTED
    if arguments.verb == "run":  # errors of the script are not ours to report
        _run_as_main(arguments.script)
    return status


def _run_as_main(script: str) -> None:
    """Like `runpy.run_path`, but ``__main__`` stays for exit handlers and threads, which may pickle
    its classes."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = script
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    exec(code, vars(module))


def _report_error(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    print(f"deepspeed-ext {arguments.verb}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _doctor(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.commands import doctor

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger would write into the report
        checks = doctor.examine()
    print(
        json.dumps(doctor.as_json(checks), indent=2) if arguments.json else doctor.as_text(checks)
    )
    return EXIT_PROBLEM if any(check.status == "problem" for check in checks) else 0


def _config(arguments: argparse.Namespace) -> int:
    """List the ready configs, or print one, by the name of its file with or without ``.json``."""
    files = {path.stem: path for path in sorted(_CONFIGS.glob("*.json"))}
    if arguments.name is None:
        print("\n".join([f"in {_CONFIGS}:", *(f"  {name}" for name in files)]))
        return 0
    path = files.get(arguments.name.removesuffix(".json"))
    if path is None:
        raise ConfigError(f"expected one of {', '.join(files)}, got {quoted(arguments.name)}")
    print(path.read_text().rstrip())
    return 0


def _require_of_one_plan(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if arguments of the other plan are given, or required ones are
    missing."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    of_memory = {names.split()[0].removeprefix("--").replace("-", "_") for names in MEMORY}
    if wrong := sorted(given & ({"on_cpu"} if arguments.memory else of_memory)):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{names}: {'not with' if arguments.memory else 'only with'} --memory")
    needs = {"--gpus N": {"ranks"}, "--model config.json or --params 7e9": {"params", "model"}}
    missing = [words for words, names in needs.items() if not names & given]
    if arguments.memory and missing:
        raise ConfigError(f"--memory needs {', and '.join(missing)}")


def _plan(arguments: argparse.Namespace) -> int:
    _require_of_one_plan(arguments)
    if arguments.memory:
        from deepspeed_ext.commands.memory.fit import run_from_cli

        print(run_from_cli(arguments))
        return 0
    from deepspeed_ext.cores.plan import PlanRequest, plan_host, plan_text, read_host

    topology, ranks, warnings = read_host(number=arguments.ranks)
    on_cpu = bool(arguments.on_cpu) or os.environ.get("DS_ACCELERATOR") == "cpu"
    plan = plan_host(topology, ranks, PlanRequest(on_cpu=on_cpu))
    plan = replace(plan, warnings=warnings + plan.warnings)
    print(json.dumps(plan.as_json()) if arguments.json else plan_text(topology, plan))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    # the ranks enable the extension themselves, or train without it
    os.environ.pop("DSEXT_AUTOLOAD", None)
    with contextlib.redirect_stdout(sys.stderr):  # as for `_doctor`
        from deepspeed_ext.commands.verify import run_from_cli

        text, passed = run_from_cli(arguments)
    print(text)
    return 0 if passed else EXIT_PROBLEM


def _prepare_run(arguments: argparse.Namespace) -> int:
    """Make this process look like ``python SCRIPT ARGS``, with the extension enabled."""
    script = os.path.realpath(arguments.script)
    if not os.path.isfile(script):
        raise ConfigError(f"no such script: {arguments.script}")
    with open(script, "rb"):  # raises if it is not readable
        pass
    from deepspeed_ext.runtime.launch import set_launch_variables

    set_launch_variables()
    import deepspeed_ext  # records the initial CPU mask, which must happen before torch is imported

    deepspeed_ext.enable()
    sys.argv = [arguments.script, *arguments.arguments]
    # Like Python, replace this command's folder by the folder of the script itself, not of a link
    # to it. With PYTHONSAFEPATH, Python adds no such folder, and the first entry is the user's.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(script)
    return 0


if __name__ == "__main__":
    sys.exit(main())
