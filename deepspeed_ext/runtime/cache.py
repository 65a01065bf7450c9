"""The cache folder, where `deepspeed-ext tune` leaves its results."""

import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return ``$DSEXT_CACHE_DIR``, or ``$XDG_CACHE_HOME/deepspeed_ext``, or ``~/.cache/deepspeed_ext``; absolute.

    Without a home directory, it is a folder for this user among the temporary files.
    """
    if configured := os.environ.get("DSEXT_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(configured)))
    stated, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(stated):
        return Path(stated) / "deepspeed_ext"
    if os.path.isabs(home):
        return Path(home) / ".cache" / "deepspeed_ext"
    return Path(tempfile.gettempdir()) / f"deepspeed_ext-{os.getuid()}"
