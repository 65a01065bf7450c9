"""Finds the native kernel, or makes it once: nothing here is ever required.

Looked for in this order: the library that ``setup.py`` built beside this file, then one in the
folder of `deepspeed_ext._cache`, compiled there on first use when a C++ compiler is on PATH. ``DSEXT_NATIVE_KERNEL=0``
turns it off.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from deepspeed_ext._cache import cache_folder
from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.kernel.native import ABI_VERSION, NativeKernel

__all__ = ["COMPILE_FLAGS", "FOLDER", "library_path"]

FOLDER = Path(__file__).parent
"""Where the sources (``*.cpp``, ``*.h``) lie, and the library that ``setup.py`` built."""
# No -ffast-math: results must be those of the reference, to rounding.
COMPILE_FLAGS = ("-O3", "-fopenmp", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_TIMEOUT_SECONDS = 120


def library_path() -> str | None:
    """Return the path of a native kernel that loads here, or ``None`` (then the reference runs)."""
    if os.environ.get("DSEXT_NATIVE_KERNEL", "1") == "0":
        return None
    with contextlib.suppress(OSError):  # the folder cannot be listed: no descriptor is free, say
        for built in sorted(FOLDER.glob("_adam_pass*.so")):
            if _loads(built):
                return str(built)
    return _compile_once()


def _loads(path: Path) -> bool:
    try:
        NativeKernel(str(path), threads=1)
    except (OSError, AttributeError) as error:
        logger.debug("native kernel %s does not load: %s", path, error)
        return False
    return True


def _compile_once() -> str | None:
    try:
        sources = sorted(FOLDER.glob("*.cpp"))
        text = b"".join(path.read_bytes() for path in (*sources, *sorted(FOLDER.glob("*.h"))))
        key = hashlib.sha256(text + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]
        target = cache_folder() / f"adam_pass-{ABI_VERSION}-{os.uname().machine}-{key}.so"
        if target.exists() and _loads(target):
            return str(target)
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None or not sources:
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            # Built aside and moved: several ranks may compile at once, and none may see half a file.
            made = Path(scratch) / target.name
            command = [compiler, *COMPILE_FLAGS, "-shared", *map(str, sources), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_SECONDS)
            if not _loads(made):
                return None
            made.replace(target)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.debug("the native kernel was not built, torch operations do its work: %s", error)
        return None
    return str(target)
