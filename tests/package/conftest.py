"""The sdist and the wheel: built once for all tests; or, for what is released, those of the folder
DIST."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.package.environments import LIBRARY, run
from tests.support.paths import ROOT

TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split("\n")


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="deepspeed_ext-package-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def checkout(folder: Path) -> Path:
    """A copy of the files that git tracks, without anything that was built."""
    for name in filter(None, TRACKED):
        if (ROOT / name).exists():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    return folder / "checkout"


@pytest.fixture(scope="session")
def built(checkout: Path, folder: Path) -> Path:
    """An sdist, and the wheel that was built from it, both in isolation."""
    run(sys.executable, "-m", "build", "--outdir", folder / "built", cwd=checkout)
    return folder / "built"


@pytest.fixture(scope="session")
def wheel(built: Path, folder: Path) -> Path:
    """The wheel with the platform tag that auditwheel finds; it would also add libraries, if any
    were missing."""
    (plain,) = built.glob("*.whl")
    with zipfile.ZipFile(plain) as archive:
        before = archive.read(LIBRARY)
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--wheel-dir",
        folder / "wheels",
        plain,
        cwd=folder,
    )
    (repaired,) = (folder / "wheels").glob("*.whl")
    with zipfile.ZipFile(repaired) as archive:
        assert archive.read(LIBRARY) == before
        assert not [name for name in archive.namelist() if ".libs/" in name]
    return repaired


@pytest.fixture(scope="session")
def sdist(request: pytest.FixtureRequest) -> Path:
    (found,) = Path(os.environ.get("DIST") or request.getfixturevalue("built")).glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def released_wheel(request: pytest.FixtureRequest) -> Path:
    if "DIST" not in os.environ:
        return request.getfixturevalue("wheel")
    (found,) = Path(os.environ["DIST"]).glob("*.whl")
    return found
