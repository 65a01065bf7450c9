"""The package as a user gets it: built in isolation, one file for every Python, run where nothing
can be compiled.

Needs a network; the last test also the right to mount. Not part of `make test`: `make test-package`
runs it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.package.environments import LIBRARY, PYTHONS, environment_of, interpreter_of, run
from tests.support import quick_start

pytestmark = pytest.mark.timeout(900)
TORCH = os.environ.get("TORCH_SPEC", "torch==2.13.0")

KERNEL_CODE = """
import ctypes, hashlib, sys
from deepspeed_ext.zenflow.worker.kernel.passes import Array
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.kernel import load_kernel, native
path = library_path()
kernel = load_kernel(path, threads=2)
bytes_touched = ctypes.create_string_buffer(1 << 16)
kernel.touch(Array(ctypes.addressof(bytes_touched), "uint8", len(bytes_touched)), 1, 1)
print(kernel.name, path == str(native.BUILT), path.startswith(sys.prefix))
print(hashlib.sha256(open(path, "rb").read()).hexdigest())
"""

COMPILERS = re.compile(
    r"([\w.-]+-)?(c\+\+|g\+\+|gcc|cc|c89|c99|cpp|clang|clang\+\+|icpx|icx)(-[\w.-]+)?"
)
BARE = """
while read -r path; do mount --bind /dev/null "$path" || exit 90; done < "$1"
shift
for compiler in cc c++ gcc g++ clang clang++; do
    if "$compiler" --version >/dev/null 2>&1; then echo "$compiler still runs" >&2; exit 91; fi
done
"$1" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null && exit 92
"$1" -c 'import deepspeed_ext.zenflow.worker.kernel.native as n; print("kernel:", n.library_path())'
shift
exec "$@"
"""


def contents(path: Path) -> dict[str, int]:
    with zipfile.ZipFile(path) as archive:
        return {
            each.filename: each.CRC
            for each in archive.infolist()
            if not each.filename.endswith("RECORD")
        }


def test_the_sdist_makes_the_wheel_of_the_checkout(
    checkout: Path, built: Path, folder: Path
) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", cwd=checkout)
    (of_sdist,), (direct,) = built.glob("*.whl"), (folder / "direct").glob("*.whl")
    assert of_sdist.name == direct.name
    assert contents(of_sdist) == contents(direct)


def test_the_tag_is_that_of_torchs_wheels(wheel: Path) -> None:
    """Or of older systems, for any Python."""
    found = re.fullmatch(r"deepspeed_ext-[\w.]+-py3-none-([\w.]+)\.whl", wheel.name)
    assert found, wheel.name
    versions = [tuple(map(int, pair)) for pair in re.findall(r"manylinux_(\d+)_(\d+)_", found[1])]
    assert max(versions) <= (2, 28), wheel.name


@pytest.mark.parametrize("python", PYTHONS)
def test_one_file_loads_in_every_python(python: str, released_wheel: Path, folder: Path) -> None:
    interpreter = environment_of(
        interpreter_of(python), folder / python, "--no-deps", released_wheel
    )
    kind, digest = run(interpreter, "-c", KERNEL_CODE, cwd=folder).splitlines()
    assert kind == "native True True"
    with zipfile.ZipFile(released_wheel) as archive:
        assert digest == hashlib.sha256(archive.read(LIBRARY)).hexdigest()


def what_a_bare_machine_lacks() -> list[Path]:
    """Compilers and OpenMP runtimes of this system."""
    folders = {Path(name).resolve() for name in os.environ["PATH"].split(":")} | {
        Path("/usr/bin"),
        Path("/usr/local/bin"),
    }
    tools = [
        path
        for each in folders
        if each.is_dir()
        for path in each.iterdir()
        if COMPILERS.fullmatch(path.name)
    ]
    libraries = [
        path
        for each in ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
        for path in Path(each).rglob("libgomp*.so*")
    ]
    return sorted({path.resolve() for path in [*tools, *libraries] if path.resolve().is_file()})


def test_the_quick_start_where_nothing_can_be_compiled(wheel: Path, folder: Path) -> None:
    """An empty environment, an empty folder, an empty home; no compiler and no OpenMP runtime but
    torch's own."""
    unshare = ["unshare", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    interpreter = environment_of(sys.executable, folder / "bare", *TORCH.split())
    run(interpreter, "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    (hidden := folder / "hidden").write_text(
        "".join(f"{path}\n" for path in what_a_bare_machine_lacks())
    )
    for name in ("empty", "home"):
        (folder / name).mkdir()
    (folder / "empty/quick_start.py").write_text(quick_start.SCRIPT)
    output = run(
        *unshare,
        *("bash", "-c", BARE, "bare", hidden, interpreter),
        *quick_start.COMMAND,
        cwd=folder / "empty",
        PATH=f"{interpreter.parent}:/usr/bin:/bin",
        HOME=str(folder / "home"),
        OMP_NUM_THREADS="1",
    )
    losses = quick_start.losses(output)
    assert len(losses) == 4, output
    assert losses[-1] < 0.5 * losses[0]
    (kernel,) = re.findall(r"^kernel: (.+)$", output, re.MULTILINE)
    assert kernel.startswith(str(interpreter.parents[1]))
    assert kernel.endswith(LIBRARY)
    assert "several times slower" not in output
    assert os.listdir(folder / "empty") == ["quick_start.py"]
    assert not list((folder / "home").rglob("*.so")), "something was compiled"
