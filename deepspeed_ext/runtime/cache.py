"""The cache folder, where `deepspeed-ext tune` leaves its results."""

import os
import stat
from pathlib import Path

from deepspeed_ext.errors import ConfigError

__all__ = ["cache_folder", "require_own"]


def cache_folder() -> Path | None:
    """Return ``$DSEXT_CACHE_DIR``, or ``$XDG_CACHE_HOME/deepspeed_ext``, or
    ``~/.cache/deepspeed_ext``; absolute.

    Without a home directory there is no cache: a folder among the temporary files could be another
    user's.
    """
    if configured := os.environ.get("DSEXT_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(configured)))
    stated, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(stated):
        return Path(stated) / "deepspeed_ext"
    return Path(home) / ".cache" / "deepspeed_ext" if os.path.isabs(home) else None


def require_own(folder: Path) -> None:
    """Check that only this user and root can put files into a cache folder; one that is absent may
    be made.

    Raises:
        ConfigError: it is a link, another user's, or others can write to it.
    """
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        raise ConfigError(f"the cache folder {str(folder)!r} cannot be used: {error}") from None
    if not stat.S_ISDIR(found.st_mode):
        why, change = "is no folder but a link or a file", "name the folder itself"
    elif found.st_uid not in (os.getuid(), 0):
        why, change = f"belongs to user {found.st_uid}", "name one of your own"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
        change = "chmod go-w it"
    else:
        return
    raise ConfigError(
        f"the cache folder {str(folder)!r} {why}, "
        f"so its files may be another user's: {change}, or set DSEXT_CACHE_DIR"
    )
