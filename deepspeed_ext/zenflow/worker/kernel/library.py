"""Finds the native kernel, an optional library beside this file, which ``pip install`` builds or a
wheel contains.

``DSEXT_NATIVE_KERNEL=0`` disables it.
"""

from pathlib import Path

from deepspeed_ext.runtime.log import is_off, warn_once
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel

__all__ = ["BUILT", "library_path"]

BUILT = Path(__file__).parent / "_adam_pass.so"
"""The library. Its name has no Python version, because it does not use Python."""


def library_path() -> str | None:
    """Return the path of the native kernel, or ``None`` to use the reference.

    Unless it is disabled, a kernel that is not available causes a warning with the reason.
    """
    if is_off("DSEXT_NATIVE_KERNEL"):
        return None
    if why := _why_unusable(BUILT):
        warn_once(
            "ZenFlow's optimizer step uses torch operations, several times slower than the native "
            f"kernel: {why}. Install the wheel, or install a C++ compiler and reinstall "
            "deepspeed_ext; DSEXT_NATIVE_KERNEL=0 accepts this"
        )
        return None
    return str(BUILT)


def _why_unusable(library: Path) -> str:
    """Why the library cannot be used; empty if it can."""
    if not library.exists():
        return f"{library} does not exist: deepspeed_ext was installed without a C++ compiler"
    try:
        NativeKernel(str(library), threads=1)
    except (OSError, AttributeError) as error:
        return f"{library} does not load ({error})"
    return ""
