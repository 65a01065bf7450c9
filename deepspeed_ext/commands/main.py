"""The command line: ``deepspeed-ext doctor, config, plan, verify, run``.

Each command imports what it needs when it runs, so ``plan`` does not import torch.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_ext.commands.arguments import (
    CORES,
    EXIT_BAD_INPUT,
    MEMORY,
    options_of,
    parser,
)
from deepspeed_ext.errors import ConfigError, DeepSpeedExtError, UnsupportedError
from deepspeed_ext.runtime.log import quoted

__all__ = ["main"]

EXIT_PROBLEM, EXIT_INTERRUPTED, EXIT_UNREAD = 1, 128 + 2, 128 + 13
_PACKAGE = Path(__file__).resolve().parent.parent
_CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""The ready-made configs and the editor schema: a wheel has them inside the package (setup.py)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a problem, 2 for bad input, 130 (as if
    killed by SIGINT) after Ctrl-C, 141 (by SIGPIPE) if the reader of its output has gone.

    Args:
        argv: the arguments; None: this process's own.
    """
    arguments = parser().parse_args(argv)
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
        return _report_error(arguments, _missing(error), EXIT_PROBLEM)
    except (DeepSpeedExtError, OSError) as error:
        return _report_error(arguments, error, EXIT_PROBLEM)
    except KeyboardInterrupt:  # as a rule while torch is imported
        return EXIT_INTERRUPTED
    if arguments.verb == "run":  # errors of the script are not ours to report
        runpy.run_path(arguments.script, run_name="__main__")
    return status


def _report_error(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    print(f"deepspeed-ext {arguments.verb}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _missing(error: ModuleNotFoundError) -> UnsupportedError:
    return UnsupportedError(
        f"{error} of {sys.executable}: install it there; deepspeed-ext doctor shows what else is "
        "missing"
    )


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


def _plan(arguments: argparse.Namespace) -> int:
    """Plan cores or memory."""
    _require_of_one_plan(arguments)
    if arguments.memory:
        from deepspeed_ext.commands.memory.command import run_from_cli

        print(run_from_cli(arguments))
        return 0
    return _plan_cores(arguments)


def _require_of_one_plan(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if arguments of the other plan are given, or required ones are
    missing."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    if wrong := sorted(given & options_of(CORES if arguments.memory else MEMORY)):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{names}: {'not with' if arguments.memory else 'only with'} --memory")
    needs = {"--gpus N": {"ranks"}, "--model config.json or --params 7e9": {"params", "model"}}
    missing = [words for words, names in needs.items() if not names & given]
    if arguments.memory and missing:
        raise ConfigError(f"--memory needs {', and '.join(missing)}")


def _plan_cores(arguments: argparse.Namespace) -> int:
    from deepspeed_ext.cores.plan import PlanRequest, plan_host, plan_text, read_host

    root = "/" if arguments.root is None else arguments.root
    topology, ranks, warnings = read_host(root, arguments.allowed, arguments.gpu_node)
    on_cpu = bool(arguments.on_cpu) or (root == "/" and os.environ.get("DS_ACCELERATOR") == "cpu")
    request = PlanRequest(arguments.pt_reserved_cores, arguments.optimizer_cores, on_cpu=on_cpu)
    plan = plan_host(topology, ranks, request)
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
