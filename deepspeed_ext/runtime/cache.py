"""The cache folder for tuning results and the compiled kernel, and a check of who could have written a file."""

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "make_private", "why_untrusted"]


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


def make_private(folder: Path) -> Path:
    """Make `folder` and its missing parents, for this user only; return its path without symbolic links.

    Existing folders keep their mode, because the user may use them for other things too.

    Raises:
        OSError: the folder cannot be made, or the path is not a folder.
    """
    folder = Path(os.path.realpath(folder))
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    return folder


def why_untrusted(path: Path) -> str | None:
    """Say why another user could have written the file or folder `path`; None if only this user and root could.

    `path` and every folder above it must belong to this user or root, and other users must not be able to write them.
    A folder above may be writable if it is sticky, because other users then cannot rename its files. `path` itself must
    not be a symbolic link.

    Raises:
        OSError: `path` or a folder above it cannot be examined.
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    for each in (path, *path.parents):
        status = each.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"{each} is a symbolic link"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to user {status.st_uid}"
        is_sticky_parent = each != path and status.st_mode & stat.S_ISVTX
        if _can_others_write(status) and not is_sticky_parent:
            return f"other users can write {each} (chmod go-w {each})"
    return None


def _can_others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return True
    return bool(status.st_mode & stat.S_IWOTH)


def _is_private_group(gid: int) -> bool:
    """Whether the group has this user's name and no other member, as on systems with a default umask of 002."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
