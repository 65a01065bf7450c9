"""Print an interpreter that can run the tests and benchmarks without network; make one if that is
possible.

    PYTHON tools/offline.py [--wheels wheels] [--venv .venv-offline]

That is the interpreter which runs this, if it has torch, DeepSpeed and pytest. If it has torch
alone, an environment is made that sees all that this interpreter sees, and what is missing is
installed into it from the folder of wheels (`make offline-wheels`), never from a network. Whatever
else is missing is said, and the exit status is 1. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("deepspeed", "pytest", "hypothesis", "pytest_timeout", "xdist")
BUILDS = ("setuptools>=70.1", "wheel")
"""What builds this package, as in pyproject.toml; an environment may hold an older setuptools."""
RIVALS = ("torchao",)
"""What `make bench-gpu` compares ours with, if the folder has it; a rival that is not there is a
row that says so."""
INSTALLED = (
    "deepspeed",
    "psutil",
    "pydantic",
    "tqdm",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    *BUILDS,
)
PACKAGE_PATHS = ("purelib", "platlib")


class OfflineError(Exception):
    """What is missing, and what to do about it."""


def interpreter(wheels: Path, folder: Path) -> Path:
    """The interpreter.

    Raises:
        OfflineError: nothing here can run the tests.
    """
    if not (3, 10) <= sys.version_info < (3, 15):
        raise OfflineError(
            f"Python 3.10 to 3.14 is needed; {sys.executable} is {sys.version.split()[0]}"
        )
    if find_spec("torch") is None:
        raise OfflineError(
            f"{sys.executable} has no torch, which is never carried: "
            "name an interpreter that has it (PYTHON=/path/to/python3), "
            "or install it first (pip install torch; `make test` sets up .venv by itself)"
        )
    if all(find_spec(name) for name in NEEDED):
        return Path(sys.executable)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not list(wheels.glob("deepspeed-*.whl")):
        missing = ", ".join(name for name in NEEDED if find_spec(name) is None)
        raise OfflineError(
            f"{sys.executable} has torch, but not {missing}, "
            f"and there are no wheels in {wheels}: run `make offline-wheels "
            f"PYTHON_VERSION={running}` on a machine with network, and copy the folder here"
        )
    python = folder / "bin" / "python"
    stamp = folder / ".complete"
    if not stamp.exists():
        _make(folder)
        _install(python, wheels)
        stamp.touch()
    return python


def _make(folder: Path) -> None:
    """An environment that sees this interpreter's packages, also where this interpreter is an
    environment's own."""
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=True, with_pip=False).create(
        folder
    )
    packages = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    seen = dict.fromkeys(sysconfig.get_path(name) for name in PACKAGE_PATHS)
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
    (packages / "_seen.pth").write_text("".join(lines))


def _install(python: Path, wheels: Path) -> None:
    if find_spec("pip") is None:
        raise OfflineError(
            f"{sys.executable} has no pip (Debian, Ubuntu: apt-get install python3-pip)"
        )
    pip = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
    ]
    commands = [
        [*pip, "--find-links", str(wheels), *INSTALLED],
        [*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)],
    ]
    present = [name for name in RIVALS if list(wheels.glob(f"{name}-*.whl"))]
    if present:
        commands.append([*pip, "--no-deps", "--find-links", str(wheels), *present])
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PIP_USER")
    }
    for command in commands:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise OfflineError(
                f"{' '.join(command)} failed:\n{run.stdout[-1000:]}{run.stderr[-3000:]}"
            )


def main() -> int:
    """Print the interpreter; 0, or 1 with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-offline")
    args = parser.parse_args()
    try:
        sys.stdout.write(f"{interpreter(args.wheels, args.venv)}\n")
    except OfflineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
