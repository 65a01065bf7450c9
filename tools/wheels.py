"""Collect the wheels that a machine without network needs beside torch: ``python -m tools.wheels``.

Builds DeepSpeed's wheel from its sdist (pure Python: its operators are compiled where they are
used) and downloads what it, the tests and the building of this package need, and what those need in
turn. Never torch, nor anything of CUDA: whatever asks for them is told that they are there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.offline import BUILDS, RIVALS

ROOT = Path(__file__).resolve().parents[1]
# As in setup.py, without torch.
RUNTIME = ("deepspeed>=0.19.6,<0.20", "hjson", "psutil>=5.9", "pydantic>=2.5", "tqdm")
TESTS = ("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", *BUILDS)
TRANSFORMERS = ("transformers>=4.48.3,<6", "accelerate>=1.3,<2")
NEVER = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)$")
SDISTS = {"deepspeed"}
LIMIT_MIB = 64


class WheelsError(Exception):
    """What is asked for cannot be collected; the message says why and what to do."""


def environment_of(python_version: str) -> dict[str, str]:
    """What markers of requirements are to be judged by: this platform under another Python."""
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
    }


def requirements_of(
    wheel: Path, environment: dict[str, str], extras: Sequence[str] = ()
) -> Iterator[Requirement]:
    """What a wheel needs in `environment`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")
        )
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for text in headers.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        asked = [{**environment, "extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(
            requirement.marker.evaluate(values) for values in asked
        ):
            yield requirement


def collect(roots: Sequence[str], folder: Path, python_version: str) -> list[Path]:
    """Put the wheels of `roots`, and of all that they need, into `folder`; return them by name.

    Raises:
        WheelsError: pip finds one of them not, or two need different versions of a third.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment, found = environment_of(python_version), dict[str, Path]()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if NEVER.match(name):
            continue
        if name not in found:
            found[name] = _wheel(requirement, folder, python_version)
            waiting += requirements_of(found[name], environment, sorted(requirement.extras))
        version = parse_wheel_filename(found[name].name)[1]
        if not requirement.specifier.contains(version, prereleases=True):
            raise WheelsError(
                f"{name} {version} was collected, and something else needs {requirement}"
            )
    for stale in set(folder.glob("*.whl")) - set(found.values()):
        stale.unlink()
    return sorted(found.values())


def _wheel(requirement: Requirement, folder: Path, python_version: str) -> Path:
    name = canonicalize_name(requirement.name)
    what = f"{requirement.name}{requirement.specifier}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if name in SDISTS:
        command = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), what]
    else:
        only = ["--only-binary", ":all:", "--python-version", python_version]
        command = [*pip, "download", "--no-deps", *only, "--dest", str(folder), what]
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise WheelsError(
            f"{what} for Python {python_version}: {' '.join(command)} failed:\n{run.stderr[-2000:]}"
        )
    names = {path: canonicalize_name(path.name.split("-")[0]) for path in folder.glob("*.whl")}
    allowed = [path for path, own in names.items() if own == name and _satisfies(path, requirement)]
    return max(allowed, key=lambda path: path.stat().st_mtime)


def _satisfies(wheel: Path, requirement: Requirement) -> bool:
    return requirement.specifier.contains(parse_wheel_filename(wheel.name)[1], prereleases=True)


def main() -> int:
    """Collect; 0, or 1 with a message."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python-version", default=running, help=f"of the other machine (default {running})"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "wheels")
    parser.add_argument(
        "--transformers", action="store_true", help="also transformers and accelerate"
    )
    args = parser.parse_args()
    try:
        roots = [*RUNTIME, *TESTS, *RIVALS, *(TRANSFORMERS if args.transformers else ())]
        wheels = collect(roots, args.folder, args.python_version)
    except WheelsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sizes = {wheel: wheel.stat().st_size / 2**20 for wheel in wheels}
    for wheel, size in sizes.items():
        sys.stdout.write(f"{size:7.2f} MiB  {wheel.name}\n")
    total = sum(sizes.values())
    sys.stdout.write(
        f"{total:7.2f} MiB  in {args.folder}, for Python {args.python_version}; without torch\n"
    )
    if total > LIMIT_MIB:
        sys.stderr.write(
            f"error: more than {LIMIT_MIB} MiB: something has pulled in what does not belong here\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
