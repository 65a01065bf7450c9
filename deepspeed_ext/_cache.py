"""Where results that outlive a run are kept: tuning results and the compiled kernel."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$DSEXT_CACHE_DIR``, else ``$XDG_CACHE_HOME/deepspeed_ext``, else ``~/.cache/deepspeed_ext``."""
    if configured := os.environ.get("DSEXT_CACHE_DIR"):
        return Path(configured)
    stated = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(stated) if os.path.isabs(stated) else Path.home() / ".cache") / "deepspeed_ext"
