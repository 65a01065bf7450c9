"""Installs trainers whose command lines `make test-trainers` runs, each into an environment of its
own.

    python -m tools.trainers                     # all
    python -m tools.trainers ms-swift

They want different versions of transformers, so they cannot share one. Each environment gets the
torch of `--torch`, and then the trainer and this package in one resolution, as `pip install
deepspeed-ext TRAINER` does. Of Axolotl's requirements some are left out (`LEFT_OUT`).
A trainer that cannot be installed is reported and left out; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

TRAINERS = {
    "llamafactory": "llamafactory==0.9.5",
    "ms-swift": "ms-swift==4.6.0",
    "axolotl": "axolotl==0.19.0",
}
"""Packages, and what pip is asked for. TRL is an extra of this package."""

LEFT_OUT = {
    "axolotl": {
        *(
            "adlfs",
            "fla-core",
            "flash-linear-attention",
            "gcsfs",
            "gradio",
            "immutabledict",
            "langdetect",
            "lm-eval",
        ),
        *("modal", "ocifs", "openenv-core", "s3fs", "tensorboard", "trackio", "xformers"),
    }
}
"""Requirements of a trainer that are not installed: pip tries versions of them for more than 15
minutes, or they need a GPU. Its training on text imports none of them."""

COMPILED_FOR_TORCH = ("torchvision", "torchaudio")
"""Packages that load only beside the torch for which they were compiled."""


def folder_of(package: str) -> Path:
    return ROOT / f".venv-trainer-{package}"


def install(package: str, torch: str, python: str) -> None:
    """Make the environment of a trainer, if it is not there.

    Raises:
        subprocess.CalledProcessError: pip cannot install it. Nothing is left.
    """
    folder = folder_of(package)
    if (folder / ".complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        _pip(folder, "install", *torch.split(), "setuptools>=70.1", "wheel", "ninja")
        wanted = [TRAINERS[package]]
        if package in LEFT_OUT:
            _pip(folder, "install", "--no-deps", *wanted)
            wanted = _requirements(folder, package)
        _pip(folder, "install", "--no-build-isolation", *torch.split(), *wanted, str(ROOT))
        for name in COMPILED_FOR_TORCH:
            _remove_if_broken(folder, name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / ".complete").touch()


def _requirements(folder: Path, package: str) -> list[str]:
    """What an installed package requires here, but for what is left out."""
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    (distribution,) = importlib.metadata.distributions(name=package, path=[str(packages)])
    found = []
    for requirement in map(Requirement, distribution.requires or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in LEFT_OUT[package]:
            requirement.marker = None
            found.append(str(requirement))
    return found


def _remove_if_broken(folder: Path, name: str) -> None:
    """Uninstall a package that does not load beside this torch. LLaMA-Factory always imports
    torchaudio, and uses it for sound only, so an empty module takes its place."""
    command = [str(folder / "bin/python"), "-c", f"import {name}"]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return
    _pip(folder, "uninstall", "--yes", name)
    if name == "torchaudio":
        (packages,) = (folder / "lib").glob("python3.*/site-packages")
        (packages / "torchaudio.py").touch()


def _pip(folder: Path, verb: str, *arguments: str) -> None:
    command = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        verb,
        "--quiet",
    ]
    subprocess.run([*command, *arguments], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trainers", nargs="*", metavar="TRAINER", help=f"of {', '.join(TRAINERS)} (all)"
    )
    torch = os.environ.get("TORCH_SPEC", "torch==2.13.0")
    parser.add_argument("--torch", default=torch, help="what pip installs as torch")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    options = parser.parse_args()
    unknown = set(options.trainers) - set(TRAINERS)
    if unknown:
        parser.error(f"expected names of {', '.join(TRAINERS)}, got {', '.join(sorted(unknown))}")
    failed = False
    for package in options.trainers or TRAINERS:
        try:
            install(package, options.torch, options.python)
        except subprocess.CalledProcessError as error:
            failed = True
            sys.stderr.write(f"note: {package} is left out: {error}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
