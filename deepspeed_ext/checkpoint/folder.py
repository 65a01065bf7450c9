"""Manages the folder of one checkpoint tag. The folder always holds one complete save, even after a
crash.

A save writes to a staging folder beside the tag's folder. Once every rank has written its files,
two renames replace the older save with the staging folder. The older save is kept under a third
name until every node has done this:

======================= ==================== =============================================
time of the crash       names on a node      result of `choose_save` and `settle`
======================= ==================== =============================================
while writing           tag, staging         the older save; a later save removes staging
between the renames     staging, replaced    the new save: all ranks had written their files
after the renames       tag, replaced        the new save
nodes differ            any of the above     the save that every node has
======================= ==================== =============================================

One job at a time saves to a folder. The names of staging and replaced folders contain the unique id
of their save, and saves are moved only by renames, so two jobs never mix their files. If another
job has replaced the tag's save meanwhile, `CheckpointFolder.swap` raises an error instead of
replacing it.

Leftovers of a crash are removed by a later save under the same tag, and under another tag after an
hour without writes. Before a folder is removed, it is renamed so that it can no longer be taken for
a save.

This module uses neither ranks nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files

_RESERVED = ".dsext-"


_TAKEN = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
"""What DeepSpeed names in the folder of all tags; no tag may have such a name."""
_STATES = "_states.pt"
"""The end of the names of DeepSpeed's files with states."""

UNKNOWN = ""
"""Save id of a folder written by plain DeepSpeed."""
_MARKER = "deepspeed_ext_save.json"
_STAGING, _REPLACED, _REMOVING = "saving", "replaced", "removing"
_BESIDE = re.compile(
    rf"(?P<tag>.+)\.dsext-(?P<role>{_STAGING}|{_REPLACED}|{_REMOVING})\.(?P<key>\w+)"
)
"""Names beside a tag's folder."""
_KEY_LENGTH = 16
_QUIET_SECONDS = 3600.0
_in_use: set[str] = set()
"""Staging folders of saves in progress in this process. They are kept however old they are: a later
step ends the save."""


@dataclass(frozen=True)
class FolderState:
    """Save ids of the folders that a node has: under the tag itself, if there is one, of staging
    folders to which every rank of the node has written its files, and of replaced saves."""

    saved: str | None
    staged: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def choose_save(states: Sequence[FolderState]) -> str | None:
    """Choose the save that every node has after `CheckpointFolder.finish_swap`, the newest if there
    are two; None: there is no checkpoint.

    Raises:
        CheckpointError: no save is complete on all nodes.
    """
    saved = {state.saved for state in states}
    if len(saved) == 1:
        return saved.pop()
    for wanted in sorted(filter(None, saved)):
        if all(wanted in (state.saved, *state.staged) for state in states):
            return wanted
    for wanted in sorted({each for state in states for each in state.replaced}):
        if all(wanted in (state.saved, *state.replaced) for state in states):
            return wanted
    raise CheckpointError(
        "the nodes have parts of different saves, "
        "and no save is complete: load another checkpoint by its tag"
    )


class CheckpointFolder:
    """The folder of one tag on one node.

    All its paths are absolute, because a save may still run when the script has changed the working
    directory.

    Args:
        save_dir: the folder of all tags.
        model_files: the end of the names of DeepSpeed's files with a model.
        save_id: unique id of the save that this object writes to `staging`; None: it only reads.
    """

    def __init__(
        self, save_dir: str, tag: str, model_files: str, save_id: str | None = None
    ) -> None:
        self.save_dir = os.path.abspath(save_dir)
        self.path = os.path.abspath(os.path.join(save_dir, tag))
        self._tag, self._model_files = tag, model_files
        self._save_id = save_id
        self._key = (save_id or "")[:_KEY_LENGTH]
        self.staging = self._beside(_STAGING, self._key)
        self._replaced = self._beside(_REPLACED, self._key)
        self._found: str | None = None

    def _beside(self, role: str, key: str) -> str:
        return f"{self.path}.dsext-{role}.{key}"

    def _keys(self, role: str) -> list[str]:
        """Keys of the folders with a role beside the tag's folder, in order."""
        parent, tag = os.path.split(self.path)
        found = map(_BESIDE.fullmatch, os.listdir(parent) if os.path.isdir(parent) else ())
        return sorted(
            m["key"] for m in found if m is not None and (m["tag"], m["role"]) == (tag, role)
        )

    def require_savable(self) -> None:
        """Check that the tag's folder can be replaced as a whole, and that the save can be found
        under it again.

        Raises:
            CheckpointError: the tag does not name a separate folder inside `save_dir`, or names one
                that something else uses.
        """
        tag, inside = self._tag, os.path.relpath(self.path, self.save_dir)
        if inside == os.curdir or inside.split(os.sep)[0] == os.pardir:
            raise CheckpointError(
                f"the tag names the folder {self.path}, which is not inside the checkpoint folder "
                f"{self.save_dir}: name a folder inside it, without '..' or a leading '/'"
            )
        # the file `latest` drops spaces at the ends, and breaks lines at control characters
        is_plain = tag == tag.strip() and not re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", tag)
        is_taken = _RESERVED in tag or inside.split(os.sep)[0] in _TAKEN
        if not is_plain or is_taken or os.pardir in tag.split(os.sep):
            raise CheckpointError(
                f"the tag {tag!r} cannot name a save: it must not begin or end with spaces, hold "
                f"control characters, '..' or {_RESERVED!r} (the mark of unfinished saves), or "
                f"begin with a name that DeepSpeed uses beside the tags "
                f"({', '.join(_TAKEN)}): save under another tag"
            )
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(
                f"{self.path} is not a folder: save elsewhere or under another tag"
            )

    def require_loadable(self) -> None:
        """Check that the tag has a save, which it lacks if its first save was interrupted.

        Raises:
            CheckpointError: the folder does not exist, or has no model file.
        """
        if not os.path.isdir(self.path) or not self._holds_model():
            raise CheckpointError(f"{self.path} holds no whole checkpoint: load another by its tag")

    def aside(self, path: str) -> str:
        """Path to which a file of this checkpoint is written."""
        inside = os.path.relpath(path, self.path)
        return (
            os.path.abspath(path)
            if inside.startswith(os.pardir)
            else os.path.normpath(f"{self.staging}/{inside}")
        )

    # -- saving ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Create an empty staging folder; remove the leftovers of interrupted saves."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.finish_swap()
        self._found = _save_id(self.path)
        os.mkdir(self.staging)
        _in_use.add(self.staging)
        self._write_marker(None)
        self._clear_leftovers()

    def mark(self) -> None:
        """Mark the staging folder as complete, by a file with the id of its save. Idempotent, also
        once the folder is in place."""
        if self._save_id not in (_save_id(self.staging), _save_id(self.path)):
            self._write_marker(self._save_id)

    def _write_marker(self, save_id: str | None) -> None:
        marker = json.dumps({"save_id": save_id}) + "\n"
        files.replace_file(os.path.join(self.staging, _MARKER), marker)

    def swap(self) -> None:
        """Put the staging folder in place. Call it when every rank of every node has written its
        files. Idempotent; completes an earlier call that an exception interrupted.

        Raises:
            CheckpointError: another job has saved under the tag since `begin`, or has removed the
                staging folder.
        """
        if _save_id(self.path) != self._save_id:
            self._require_unchanged()
            if os.path.lexists(self.path):
                os.rename(self.path, self._replaced)
            os.rename(self.staging, self.path)
        files.sync_folder(os.path.dirname(self.path))

    def _require_unchanged(self) -> None:
        """Raise if another job has put a save in place since `begin`, or removed this one."""
        now = _save_id(self.path)
        is_new = now not in (None, self._found) and (now != UNKNOWN or self._holds_save())
        if is_new or not os.path.lexists(self.staging):
            what = "has saved under" if is_new else "or a person has removed"
            raise CheckpointError(
                f"another job {what} {self.path if is_new else self.staging} since this save began "
                f"(save id {now or 'none'}, expected {self._found or 'none'}): stop one of the "
                "jobs, or give each a folder of its own"
            )

    def end(self) -> None:
        """Remove the older save. Call it when every node has swapped."""
        _in_use.discard(self.staging)
        self._drop_replaced(self._replaced)

    def give_up(self) -> None:
        """Undo the save as far as possible; the next save or load undoes the rest.

        If there was an older save and it is gone, the new one is the only copy and stays.
        """
        _in_use.discard(self.staging)
        with contextlib.suppress(OSError, CheckpointError):
            has_older = os.path.lexists(self._replaced)
            if _save_id(self.path) == self._save_id and (has_older or self._found is None):
                os.rename(self.path, self.staging)
            if has_older and not os.path.lexists(self.path):
                files.rename(self._replaced, self.path)
            if os.path.lexists(self.path) or self._found is None:
                self._discard(self.staging)
            if self._holds_save():
                self._drop_replaced(self._replaced)

    def _holds_save(self) -> bool:
        """Whether the tag's folder has a marker of ours, or a model."""
        return os.path.isdir(self.path) and (
            os.path.lexists(os.path.join(self.path, _MARKER)) or self._holds_model()
        )

    def _holds_model(self) -> bool:
        return any(name.endswith(self._model_files) for name in os.listdir(self.path))

    def _drop_replaced(self, replaced: str) -> None:
        """Remove an older save; move files that others have added to it to the newer one."""
        if not os.path.lexists(replaced):
            return
        for name in os.listdir(replaced) if not os.path.islink(replaced) else ():
            source, target = os.path.join(replaced, name), os.path.join(self.path, name)
            if name == _MARKER or name.endswith(_STATES) or os.path.lexists(target):
                continue
            os.rename(source, target)
        files.sync_folder(self.path)
        self._discard(replaced)

    def _discard(self, folder: str) -> None:
        """Remove a folder. It is renamed first, so that a partly removed folder is never taken for
        a save."""
        doomed = self._beside(_REMOVING, uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, doomed)
            files.remove_tree(doomed)

    # -- after a crash -----------------------------------------------------------------------------

    def finish_swap(self) -> None:
        """Complete a swap that was interrupted between its two renames."""
        replaced = [] if os.path.lexists(self.path) else self._keys(_REPLACED)
        staged = [key for key in replaced if os.path.lexists(self._beside(_STAGING, key))]
        sources = [self._beside(_STAGING, key) for key in staged] or [
            self._beside(_REPLACED, key) for key in replaced
        ]
        for source in sources[:1]:
            files.rename(source, self.path)

    def state(self) -> FolderState:
        """The save ids under the tag's names."""
        staged, replaced = (
            [_save_id(self._beside(role, key)) for key in self._keys(role)]
            for role in (_STAGING, _REPLACED)
        )
        return FolderState(
            _save_id(self.path),
            tuple(filter(None, staged)),
            tuple(each for each in replaced if each is not None),
        )

    def settle(self, state: FolderState, save_id: str | None) -> None:
        """Put the save that `choose_save` has chosen under the tag's name."""
        if state.saved == save_id:
            return
        assert save_id is not None, "choose_save chooses a save that every node has"
        if save_id in state.staged:
            tag = os.path.relpath(self.path, self.save_dir)
            chosen = CheckpointFolder(self.save_dir, tag, self._model_files, save_id)
            chosen._found = state.saved
            chosen.swap()
        else:
            keys = [
                key
                for key in self._keys(_REPLACED)
                if _save_id(self._beside(_REPLACED, key)) == save_id
            ]
            self._discard(self.path)
            files.rename(self._beside(_REPLACED, keys[0]), self.path)

    def _clear_leftovers(self) -> None:
        """Remove leftovers of interrupted saves under any tag, as far as possible."""
        parent = os.path.dirname(self.path)
        # by the file system's clock, which may be another host's
        now = os.stat(self.staging).st_mtime
        names = os.listdir(parent)
        for path in (os.path.join(parent, name) for name in names if files.TEMPORARY in name):
            with contextlib.suppress(OSError):
                if os.stat(path).st_mtime < now - _QUIET_SECONDS:
                    os.unlink(path)
        for found in filter(None, map(_BESIDE.fullmatch, names)):
            other = CheckpointFolder(parent, found["tag"], self._model_files)
            with contextlib.suppress(OSError, CheckpointError):
                if found["role"] == _REMOVING:
                    files.remove_tree(os.path.join(parent, found.string))
                elif other._is_leftover(found["key"], now, is_own=other.path == self.path):
                    other._clear(found["key"])

    def _is_leftover(self, key: str, now: float, is_own: bool) -> bool:
        """Whether no save with this key goes on; `is_own`: this job saves under the same tag. A
        folder that is being swapped is found under one of its two names."""
        if (staging := self._beside(_STAGING, key)) in _in_use:
            return False
        if is_own:
            return True
        times = [0.0]
        for folder in filter(os.path.isdir, (staging, self.path, self._beside(_REPLACED, key))):
            for path in [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]:
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    times.append(os.stat(path).st_mtime)
        return max(times) < now - _QUIET_SECONDS

    def _clear(self, key: str) -> None:
        """Remove the leftovers of an interrupted save; if it is complete and the only one, finish
        it instead."""
        self.finish_swap()
        self._discard(self._beside(_STAGING, key))
        if self._holds_save():
            self._drop_replaced(self._beside(_REPLACED, key))


def _save_id(folder: str) -> str | None:
    """The id of the save in a folder; None: there is no folder, or the save is not complete."""
    if not os.path.isdir(folder):
        return None
    try:
        with open(os.path.join(folder, _MARKER), encoding="utf-8") as file:
            save_id = json.loads(file.read(1000))["save_id"]
    except FileNotFoundError:
        return UNKNOWN  # plain DeepSpeed wrote the save
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{os.path.join(folder, _MARKER)} is damaged "
            f"({error}): load another checkpoint by its tag"
        ) from None
    return None if save_id is None else str(save_id)
