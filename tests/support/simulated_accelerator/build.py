"""Compiles the simulated accelerator once for each version of its source and of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from tests.support.paths import ROOT

__all__ = ["library_path", "load_library"]

_NAME = "_simulated"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O1", "-g0", "-std=c++20"]


def library_path() -> Path:
    """Return the path of the compiled library; compiles it if there is none yet, which takes half a
    minute."""
    files = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(
        "\0".join([str(sys.implementation.cache_tag), torch.__version__, *_FLAGS]).encode()
    )
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder = root / f"simulated_accelerator_{digest.hexdigest()[:16]}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        for older in root.glob("simulated_accelerator_*"):
            shutil.rmtree(older, ignore_errors=True)
        _compile([file for file in files if file.suffix == ".cpp"], folder)
    return folder / f"{_NAME}.so"


def _compile(files: list[Path], folder: Path) -> None:
    """Compile in a folder of its own: torch's lock on a build folder outlives a killed process.

    It is done by another process, because torch also loads what it has compiled.
    """
    with tempfile.TemporaryDirectory(prefix="building_", dir=folder.parent) as scratch:
        # One unit of all sources: nearly all the time goes into torch's headers.
        everything = Path(scratch) / "everything.cpp"
        everything.write_text("".join(f'#include "{file}"\n' for file in files))
        build = [sys.executable, "-m", __spec__.name, scratch, str(everything)]
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"the simulated accelerator could not be compiled\n{done.stdout}\n{done.stderr}"
            )
        finished = Path(scratch) / "finished"
        finished.mkdir()
        shutil.move(Path(scratch) / f"{_NAME}.so", finished)
        with suppress(OSError):  # another process was faster
            finished.rename(folder)


def load_library() -> ModuleType:
    """Load the library, which registers the device with torch."""
    loader = ExtensionFileLoader(_NAME, str(library_path()))
    module = module_from_spec(spec_from_loader(_NAME, loader))
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    cpp_extension.load(
        _NAME,
        sys.argv[2:],
        extra_cflags=_FLAGS,
        build_directory=sys.argv[1],
        is_python_module=False,
    )
