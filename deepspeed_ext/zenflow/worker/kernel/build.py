"""Finds the native kernel, or compiles it once. The kernel is optional.

Search order: the library that a wheel brought or ``setup.py`` built beside this file, then one in the folder of
`deepspeed_ext.runtime.cache`, compiled there on first use if there is a C++ compiler on PATH. If another user could write to
that folder, the library is compiled into a temporary folder for this process. ``DSEXT_NATIVE_KERNEL=0`` disables the
kernel.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from deepspeed_ext.runtime.cache import cache_folder, make_private, why_untrusted
from deepspeed_ext.runtime.files import sync_folder
from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.zenflow.worker.kernel.compile_flags import COMPILE_FLAGS
from deepspeed_ext.zenflow.worker.kernel.native import ABI_VERSION, NativeKernel
from deepspeed_ext.zenflow.worker.kernel.sealed import is_whole_elf, is_whole_sealed, seal

__all__ = ["BUILT_NAME", "FOLDER", "library_path"]

FOLDER = Path(__file__).parent
"""Folder of the sources (``*.cpp``, ``*.h``), and of the library that ``setup.py`` built."""
BUILT_NAME = "_adam_pass.so"
"""File name of that library. It does not name a version of Python, because it uses nothing of Python."""
_COMPILE_TIMEOUT_SECONDS = 120
_SCRATCH_PREFIX = "build-"


class _BuildError(Exception):
    """Explains why there is no native kernel."""


def library_path() -> str | None:
    """Return the absolute path of a native kernel that loads here, or ``None`` to use the reference.

    Unless it is disabled, a kernel that is not available causes a warning with the reason.
    """
    if os.environ.get("DSEXT_NATIVE_KERNEL", "1") == "0":
        return None
    with contextlib.suppress(OSError):  # the folder cannot be listed, for example without a free descriptor
        built = FOLDER / BUILT_NAME
        if built.exists() and is_whole_elf(built) and _loads(built):
            return str(built)
    try:
        return str(_find_or_compile())
    except (_BuildError, OSError) as error:
        warn_once(
            f"ZenFlow's optimizer step uses torch operations, several times slower than the native kernel: {error}. "
            "Install a C++ compiler, or set DSEXT_NATIVE_KERNEL=0 to accept this"
        )
        return None


def _loads(path: Path) -> bool:
    try:
        NativeKernel(str(path), threads=1)
    except (OSError, AttributeError) as error:
        logger.debug("native kernel %s does not load: %s", path, error)
        return False
    return True


def _find_or_compile() -> Path:
    name = _library_name()
    try:
        folder = make_private(cache_folder())
        reason = why_untrusted(folder)
        if reason is None:
            return _compiled(folder / name)
    except OSError as error:
        reason = str(error)
    warn_once(
        f"the native kernel is compiled for this process only, because its cache cannot be used: {reason}. "
        "Fix that, or set DSEXT_CACHE_DIR to a folder that only you can write to"
    )
    return _compiled(_temporary_folder(os.getpid()) / name)


def _compiled(library: Path) -> Path:
    if not _is_usable(library):
        _compile(library)
    return library


def _library_name() -> str:
    """A file name that depends on sources, flags, ABI version and machine."""
    text = b"".join(path.read_bytes() for path in _sources("*.cpp") + _sources("*.h"))
    key = hashlib.sha256(text + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]
    return f"adam_pass-{ABI_VERSION}-{os.uname().machine}-{key}.so"


def _sources(pattern: str) -> list[Path]:
    return sorted(FOLDER.glob(pattern))


def _is_usable(library: Path) -> bool:
    """Whether the cached library exists, is trusted and complete, and loads. Loading comes last, because it executes
    the file's code."""
    try:
        if reason := why_untrusted(library):
            warn_once(f"a cached native kernel is compiled again instead of loaded: {reason}")
            return False
        return is_whole_sealed(library) and _loads(library)
    except OSError as error:
        logger.debug("no cached native kernel: %s", error)
        return False


@functools.cache
def _temporary_folder(pid: int) -> Path:
    """A folder that is removed when process `pid` ends; a forked child must not remove its parent's."""
    folder = Path(tempfile.mkdtemp(prefix="deepspeed_ext-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _compiler() -> list[str]:
    if configured := os.environ.get("CXX"):
        try:
            return shlex.split(configured)
        except ValueError as error:
            raise _BuildError(f"CXX={configured!r} cannot be parsed: {error}") from None
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise _BuildError("no C++ compiler is on PATH")
    return [found]


def _compile(library: Path) -> None:
    """Compile in a scratch folder, then rename: ranks may compile concurrently, and none may see a partial file,
    even after a power loss."""
    sources = _sources("*.cpp")
    if not sources:
        raise _BuildError(f"its sources are missing in {FOLDER}")
    compiler = _compiler()
    _remove_interrupted_builds(library.parent)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_SCRATCH_PREFIX) as scratch:
        made = Path(scratch) / library.name
        _run([*compiler, *COMPILE_FLAGS, "-shared", *map(str, sources), "-o", str(made)])
        if not _loads(made):
            raise _BuildError(f"the library compiled by {shlex.join(compiler)} does not load")
        seal(made)
        made.replace(library)
    sync_folder(str(library.parent))


def _remove_interrupted_builds(folder: Path) -> None:
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > 10 * _COMPILE_TIMEOUT_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()
        raise _BuildError(f"{command[0]} exited with status {error.returncode}: {words[-300:]}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _BuildError(str(error)) from None
