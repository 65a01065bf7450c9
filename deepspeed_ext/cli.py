"""The command line: ``deepspeed-ext doctor | plan | tune | run``.

Each command imports what it needs when it runs: ``plan`` answers without importing torch.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepspeed_ext._errors import ConfigError, DeepSpeedExtError, UnsupportedError
from deepspeed_ext._version import __version__

__all__ = ["main"]

EXIT_PROBLEM, EXIT_BAD_INPUT = 1, 2


class _Parser(argparse.ArgumentParser):
    """Bad input is one line on stderr and exit status 2; the usage is behind --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.name == "run":  # whatever the script raises is its own
        return _run(parser, arguments)
    try:
        return arguments.command(arguments)
    except (ConfigError, UnsupportedError, ValueError) as error:
        return _complain(arguments, error, EXIT_BAD_INPUT)
    except (DeepSpeedExtError, OSError) as error:
        return _complain(arguments, error, EXIT_PROBLEM)


def _complain(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    print(f"deepspeed-ext {arguments.name}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="deepspeed-ext", description="Tools of the deepspeed_ext package.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="doctor | plan | tune | run")
    _add_doctor(commands)
    _add_plan(commands)
    _add_tune(commands)
    _add_run(commands)
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[_Parser]") -> None:
    doctor = commands.add_parser(
        "doctor", help="can this machine run each part, and what is missing", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    plan = commands.add_parser("plan", help="which rank gets which CPU cores, and why", allow_abbrev=False)
    plan.add_argument("--root", default="/", metavar="DIR", help="directory that holds sys/ and proc/ [/]")
    _add_ranks(plan)
    plan.add_argument(
        "--pt-reserved-cores",
        metavar="X",
        type=_reserved_cores,
        help="cores of a rank kept for PyTorch: a count, or a fraction between 0 and 1 [0.5]",
    )
    plan.add_argument(
        "--optimizer-cores",
        metavar="K",
        type=_positive,
        help="cores of a rank for its optimizer [as tuned here, else the rest]",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--svg", metavar="FILE", help="also draw the plan")
    plan.set_defaults(command=_plan)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allowed", metavar="LIST", action="append", help="CPUs of a local rank, such as 0,4-11; repeat for each rank"
    )
    parser.add_argument(
        "--gpu-node",
        metavar="N",
        action="append",
        type=_node,
        help="NUMA node of a local rank's accelerator, or none; repeat for each rank",
    )


def _add_tune(commands: "argparse._SubParsersAction[_Parser]") -> None:
    tune = commands.add_parser("tune", help="measure how many cores the optimizer needs", allow_abbrev=False)
    tune.add_argument("--ranks", metavar="R", type=_positive, help="local ranks [number of accelerators, at least 1]")
    _add_ranks(tune)
    tune.add_argument("--quick", action="store_true", help="fewer steps on smaller buffers: under 20 seconds")
    tune.add_argument(
        "--elements", metavar="M", type=_positive, help="parameters of a rank to update [from cache size]"
    )
    tune.add_argument(
        "--gpu-step-ms", metavar="MS", type=float, help="accelerator time of a step that hides the update"
    )
    tune.add_argument("--update-interval", metavar="S", type=_positive, default=1, help="steps a host update [1]")
    tune.add_argument("--plot", metavar="FILE", help="draw bandwidth against cores (PNG, PDF, SVG)")
    tune.add_argument("--output", metavar="FILE", help="write the result there and not into the cache")
    tune.add_argument("--json", action="store_true", help="print the result as JSON")
    tune.set_defaults(command=_tune)


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    run = commands.add_parser(
        "run", help="run an unchanged training script with the extension enabled", allow_abbrev=False
    )
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)


def _reserved_cores(text: str) -> int | float:
    from deepspeed_ext.affinity.plan import check_reserved_cores

    try:
        return check_reserved_cores(int(text) if text.isdecimal() else float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _node(text: str) -> int | None:
    if text in ("-1", "none"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a NUMA node number, -1 or none, got {text!r}")
    return int(text)


def _doctor(arguments: argparse.Namespace) -> int:
    from deepspeed_ext import doctor

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed's logger would otherwise write into the report
        checks = doctor.examine()
    print(json.dumps(doctor.as_json(checks), indent=2) if arguments.json else doctor.as_text(checks))
    return EXIT_PROBLEM if any(check.status == "problem" for check in checks) else 0


def _plan(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.affinity import tuned
    from deepspeed_ext.affinity.host import read_host
    from deepspeed_ext.affinity.plan import PlanRequest, plan_host
    from deepspeed_ext.affinity.report import plan_svg, plan_text

    host = read_host(arguments.root, arguments.allowed, arguments.gpu_node)
    optimizer_cores = arguments.optimizer_cores
    if optimizer_cores is None and arguments.pt_reserved_cores is None and arguments.root == "/":
        optimizer_cores = tuned.load_all().get(tuned.Fingerprint.of(host.topology, host.ranks).key)
    request = PlanRequest(arguments.pt_reserved_cores, optimizer_cores)
    plan = host.with_warnings(plan_host(host.topology, host.ranks, request))
    print(json.dumps(plan.as_json()) if arguments.json else plan_text(host.topology, plan))
    if arguments.svg:
        Path(arguments.svg).write_text(plan_svg(host.topology, plan))
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.affinity.tune import run_from_cli

    for text in run_from_cli(arguments):
        print(text)
    return 0


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if not Path(arguments.script).is_file():
        parser.error(f"run: there is no script {arguments.script}")
    import deepspeed_ext  # takes the affinity snapshot, which must come before torch

    deepspeed_ext.enable()
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(arguments.script))
    runpy.run_path(arguments.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
