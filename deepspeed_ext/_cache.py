"""Where results that outlive a run are kept (tuning results, the compiled kernel), and whether they can be trusted."""

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "make_private", "why_untrusted"]


def cache_folder() -> Path:
    """``$DSEXT_CACHE_DIR``, else ``$XDG_CACHE_HOME/deepspeed_ext``, else ``~/.cache/deepspeed_ext``; absolute.

    Without a home it is a folder of this user among the temporary files.
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
    """Make what is missing of `folder`, for this user alone, and return its path without symbolic links.

    Folders that are there keep their mode: they may be the user's own for other things too.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    folder = Path(os.path.realpath(folder))
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)
    return folder


def why_untrusted(path: Path) -> str | None:
    """Why another user could have written the file or folder `path`, or None if only this user and root could.

    It and every folder above it must belong to this user or to root, and others must not be able to write them. A
    folder above it may be writable if it is sticky: then nobody else can rename what is in it. The file itself must
    not be a symbolic link.

    Raises:
        OSError: it cannot be examined.
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    for place in (path, *path.parents):
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode):
            return f"{place} is a symbolic link"
        if found.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to user {found.st_uid}"
        is_sticky_parent = place != path and found.st_mode & stat.S_ISVTX
        if _can_others_write(found) and not is_sticky_parent:
            return f"other users can write {place} (chmod go-w {place})"
    return None


def _can_others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return True
    return bool(found.st_mode & stat.S_IWOTH)


def _is_private_group(gid: int) -> bool:
    """Whether this user is alone in the group and has its name, as on systems whose usual umask is 002."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
