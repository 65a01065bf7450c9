"""The wheel's name and content, built from a kernel that compiles in no time, and what the real
kernel needs.

`make test-package` builds, installs and runs the real wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from deepspeed_ext.zenflow.worker.kernel.native import library_path
from tests.support.paths import ROOT
from tools.offline import BUILDS

LIBRARY = "deepspeed_ext/zenflow/worker/kernel/_adam_pass.so"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
NEEDED = re.compile(r"(libstdc\+\+|libm|libc|libgcc_s|libpthread|ld-linux[\w-]*)\.so\.\d+")
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
"""Of manylinux_2_28, which torch's wheels have too."""


def build_wheel(folder: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel of a copy of the package whose kernel is one empty function."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.cpp")
    shutil.copytree(ROOT / "deepspeed_ext", folder / "deepspeed_ext", ignore=ignored)
    (folder / "deepspeed_ext/zenflow/worker/kernel/stub.cpp").write_text(
        'extern "C" void stub() {}\n'
    )
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    variables = {**os.environ, "PYTHONPATH": "", **environment}
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    (wheel,) = (folder / "dist").iterdir()
    return zipfile.ZipFile(wheel)


def tag(wheel: zipfile.ZipFile) -> str:
    """What the name says of Pythons and platforms, and the wheel's own word is the same."""
    found = Path(str(wheel.filename)).stem.split("-", 2)[2]
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    assert f"Tag: {found}" in wheel.read(metadata).decode().splitlines()
    return found


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_one_wheel_of_a_platform_is_for_every_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert tag(wheel) == f"py3-none-{PLATFORM}"
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "deepspeed_ext").rglob("*")
        if path.is_file()
    }
    configs = {f"deepspeed_ext/configs/{path.name}" for path in (ROOT / "configs").glob("*.json")}
    assert files == {*package, *configs, LIBRARY}
    assert len(configs) > 5


def test_without_a_compiler_the_wheel_is_for_every_platform(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="false", CXX="false")
    assert tag(wheel) == "py3-none-any"
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
    assert "deepspeed_ext/zenflow/worker/kernel/stub.cpp" in wheel.namelist()


@pytest.mark.skipif(
    library_path() is None or shutil.which("readelf") is None, reason="no kernel, or no readelf"
)
def test_the_kernel_needs_neither_python_nor_openmp_nor_a_new_glibc() -> None:
    command = [
        "readelf",
        "--wide",
        "--dynamic",
        "--version-info",
        "--dyn-syms",
        str(library_path()),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", said)
    assert needed
    assert not [name for name in needed if not NEEDED.fullmatch(name)]
    for kind, version in set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)\b", said)):
        assert tuple(map(int, version.split("."))) <= NEWEST[kind], f"{kind}_{version}"
    undefined = re.findall(r" UND (\w+)", said)
    assert "memmove" in undefined or "memset" in undefined
    assert not [name for name in undefined if re.match(r"_?Py|GOMP|omp_", name)]


def test_every_environment_gets_the_setuptools_that_builds_this_package() -> None:
    """The environments of old Pythons come with an older one, and not every torch asks for
    another."""
    found = re.search(
        r'^requires = \["(setuptools.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert found
    assert found[1] in BUILDS
    assert f"$(PIP) $(TORCH_SPEC) '{found[1]}' wheel;" in (ROOT / "Makefile").read_text()
