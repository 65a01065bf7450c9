"""The command line: ``deepspeed-ext doctor, config, plan, verify, run``.

Each command imports what it needs when it runs, so ``plan`` does not import torch.
"""

import argparse
import contextlib
import json
import os
import runpy
import select
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from deepspeed_ext import __version__
from deepspeed_ext.commands.argument_types import (
    MAX_CORES,
    MAX_RANKS,
    node,
    reserved_cores,
    whole,
)
from deepspeed_ext.commands.memory_arguments import add_arguments
from deepspeed_ext.errors import ConfigError, DeepSpeedExtError, UnsupportedError

__all__ = ["main"]

EXIT_PROBLEM, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_UNREAD = 1, 2, 128 + 2, 128 + 13
EXAMPLES = {
    "doctor": "deepspeed-ext doctor",
    "config": "deepspeed-ext config trainer_zenflow > ds.json",
    "plan": "deepspeed-ext plan --memory --params 7e9 "
    "--gpus 1 --gpu-gb 24 --host-gb 128 --write ds.json",
    "verify": "deepspeed-ext verify --config ds.json",
    "run": "deepspeed-ext run train.py --lr 1e-4",
}
"""A command line for the end of each command's --help."""


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one line on stderr, with exit status 2; --help shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a problem, 2 for bad input, 130 (as if
    killed by SIGINT) after Ctrl-C, 141 (by SIGPIPE) if the reader of its output has gone.

    Args:
        argv: the arguments; None: this process's own.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError as error:
        return EXIT_UNREAD if _give_up_output() else _report_error(arguments, error, EXIT_PROBLEM)
    except (ConfigError, UnsupportedError, ValueError) as error:
        return _report_error(arguments, error, EXIT_BAD_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "deepspeed_ext"):  # our own mistake
            raise
        return _report_error(arguments, _missing(error), EXIT_PROBLEM)
    except (DeepSpeedExtError, OSError) as error:
        return _report_error(arguments, error, EXIT_PROBLEM)
    except KeyboardInterrupt:  # as a rule while torch is imported
        return EXIT_INTERRUPTED
    if arguments.verb == "run":  # errors of the script are not ours to report
        runpy.run_path(arguments.script, run_name="__main__")
    return status


def _give_up_output() -> bool:
    """Return whether the reader of stdout has gone; if so, drop the remaining output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in output.poll(0)):
        return False
    # otherwise Python would flush again at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _report_error(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    print(f"deepspeed-ext {arguments.verb}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _missing(error: ModuleNotFoundError) -> UnsupportedError:
    return UnsupportedError(
        f"{error} of {sys.executable}: install it there; deepspeed-ext doctor shows what else is "
        "missing"
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="deepspeed-ext", description="Tools of the deepspeed_ext package.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="verb", required=True, metavar=" | ".join(EXAMPLES))
    _add_doctor(commands)
    _add_config(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_run(commands)
    for name, command in commands.choices.items():
        command.epilog = f"example: {EXAMPLES[name]}"
        # this formatter does not break the lines of the example
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[_Parser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine can run each part, and what is missing",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)


def _add_config(commands: "argparse._SubParsersAction[_Parser]") -> None:
    config = commands.add_parser(
        "config", help="list the ready configs, or print one of them", allow_abbrev=False
    )
    config.add_argument(
        "name", metavar="NAME", nargs="?", help="a config's name, or schema [list them]"
    )
    config.set_defaults(command=_config)


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="show which CPU cores each rank gets; with --memory, how much memory a run needs",
        allow_abbrev=False,
    )
    plan.add_argument("--root", metavar="DIR", help="directory that holds sys/ and proc/ [/]")
    _add_ranks(plan)
    plan.add_argument(
        "--pt-reserved-cores",
        metavar="X",
        type=reserved_cores,
        help="cores per rank kept for PyTorch: a count, "
        "or a fraction between 0 and 1 [an eighth, 2 to 4]",
    )
    plan.add_argument(
        "--optimizer-cores",
        metavar="K",
        type=whole(1, MAX_CORES),
        help="cores per rank for the optimizer [the rest]",
    )
    plan.add_argument(
        "--on-cpu",
        action="store_const",
        const=True,
        help="plan for training on the CPU: PyTorch keeps half [if DS_ACCELERATOR is cpu]",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    of_cores = _arguments(plan) - {"json"}
    add_arguments(plan)
    of_memory = _arguments(plan) - of_cores - {"json", "memory"}
    plan.set_defaults(command=partial(_plan, of_cores=of_cores, of_memory=of_memory))


def _arguments(parser: _Parser) -> set[str]:
    """Names of the arguments that a parser has so far."""
    return {action.dest for action in parser._actions}


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allowed",
        metavar="LIST",
        action="append",
        help="CPUs of a local rank, such as 0,4-11; repeat per rank",
    )
    parser.add_argument(
        "--gpu-node",
        metavar="N",
        action="append",
        type=node,
        help="NUMA node of a local rank's accelerator, or none; repeat per rank",
    )


def _add_verify(commands: "argparse._SubParsersAction[_Parser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="train a small model with a config and with plain AdamW, and compare the two",
        allow_abbrev=False,
    )
    verify.add_argument("--config", metavar="FILE", required=True, help="DeepSpeed config to check")
    verify.add_argument(
        "--ranks",
        metavar="N",
        type=whole(1, MAX_RANKS),
        help="processes [number of accelerators, or 2 without]",
    )
    for option, metavar, least, most, default, words in (
        ("--steps", "N", 4, 1000, None, "optimizer steps [as needed]"),
        ("--timeout", "S", 1, 24 * 3600, 600, "seconds for all of it [600]"),
    ):
        kind = whole(least, most)
        verify.add_argument(option, metavar=metavar, type=kind, default=default, help=words)
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(command=_verify)


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    run = commands.add_parser(
        "run",
        help="run an unchanged training script with the extension enabled",
        allow_abbrev=False,
    )
    run.add_argument("script", metavar="SCRIPT")
    arguments = run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    arguments.required = False  # as it is; argparse of Python 3.10 and 3.11 has True
    run.set_defaults(command=_prepare_run)


def _doctor(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.commands import doctor

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger would write into the report
        checks = doctor.examine()
    print(
        json.dumps(doctor.as_json(checks), indent=2) if arguments.json else doctor.as_text(checks)
    )
    return EXIT_PROBLEM if any(check.status == "problem" for check in checks) else 0


def _config(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.commands.ready_configs import config_text, listing

    print(listing() if arguments.name is None else config_text(arguments.name).rstrip())
    return 0


def _plan(arguments: argparse.Namespace, *, of_cores: set[str], of_memory: set[str]) -> int:
    """Plan cores or memory.

    Args:
        of_cores, of_memory: names of the arguments of one of the two plans alone.
    """
    _require_of_one_plan(arguments, of_cores if arguments.memory else of_memory)
    if arguments.memory:
        from deepspeed_ext.commands.memory.command import run_from_cli

        print(run_from_cli(arguments))
        return 0
    return _plan_cores(arguments)


def _require_of_one_plan(arguments: argparse.Namespace, of_other: set[str]) -> None:
    """Raise `ConfigError` if arguments of the other plan are given, or required ones are
    missing."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    if wrong := sorted(given & of_other):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{names}: {'not with' if arguments.memory else 'only with'} --memory")
    needs = {"--gpus N": {"ranks"}, "--model config.json or --params 7e9": {"params", "model"}}
    missing = [words for words, names in needs.items() if not names & given]
    if arguments.memory and missing:
        raise ConfigError(f"--memory needs {', and '.join(missing)}")


def _plan_cores(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.cores.plan import PlanRequest, plan_host
    from deepspeed_ext.cores.report import plan_text, read_host

    root = "/" if arguments.root is None else arguments.root
    host = read_host(root, arguments.allowed, arguments.gpu_node)
    on_cpu = bool(arguments.on_cpu) or (root == "/" and os.environ.get("DS_ACCELERATOR") == "cpu")
    request = PlanRequest(arguments.pt_reserved_cores, arguments.optimizer_cores, on_cpu=on_cpu)
    plan = host.with_warnings(plan_host(host.topology, host.ranks, request))
    print(json.dumps(plan.as_json()) if arguments.json else plan_text(host.topology, plan))
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
