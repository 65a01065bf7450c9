"""Manages the folder of one checkpoint tag so that it always holds one complete save, even after a crash.

A save writes to a staging folder beside the tag's folder. Once every rank has written its files, two renames put the
staging folder in the place of the older save. The older save is kept under a third name until every node has done this:

======================= ==================== =============================================
time of the crash       names on a node      result of `choose_save` and `settle`
======================= ==================== =============================================
while writing           tag, staging         the older save; the next save removes staging
between the renames     staging, replaced    the new save: all ranks had written their files
after the renames       tag, replaced        the new save
nodes differ            any of the above     the save that every node has
======================= ==================== =============================================

What a save under another tag finds beside it may be such a rest, or belong to a save that goes on: of another engine of
this process, or of another job. It touches only what nobody has written to for an hour. Locks would tell at once, but
not on every file system, nor between hosts.

This module knows neither ranks nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files as _files

__all__ = ["UNKNOWN", "CheckpointFolder", "FolderState", "choose_save"]

UNKNOWN = ""
"""Save id of a folder written by plain DeepSpeed."""
_MARKER = "deepspeed_ext_save.json"
_STAGING = ".dsext-saving"
_REPLACED = ".dsext-replaced"
_STATES = "_states.pt"
_QUIET_SECONDS = 3600.0
_in_use: set[str] = set()
"""Staging folders of saves of this process that go on, however long ago they were written: a later step ends them."""


@dataclass(frozen=True)
class FolderState:
    """Save ids of what a node has under the three names of a tag; None: nothing there."""

    saved: str | None
    staged: str | None
    replaced: str | None


def choose_save(states: Sequence[FolderState]) -> str | None:
    """Choose the save that every node has, the newest if there are two; None: there is no checkpoint.

    Args:
        states: one per node, taken after `CheckpointFolder.finish_swap`.

    Raises:
        CheckpointError: no save is complete on all nodes.
    """
    saved = {state.saved for state in states}
    if len(saved) == 1:
        return saved.pop()
    for wanted in sorted(filter(None, saved)):
        if all(wanted in (state.saved, state.staged) for state in states):
            return wanted
    for wanted in sorted({state.replaced for state in states if state.replaced is not None}):
        if all(wanted in (state.saved, state.replaced) for state in states):
            return wanted
    raise CheckpointError(
        "the nodes have parts of different saves, and no save is complete: load another checkpoint by its tag"
    )


class CheckpointFolder:
    """The folder of one tag on one node.

    All its paths are absolute, because a save may go on when the script has gone to another folder.

    Args:
        save_dir: the folder of all tags.
        tag: name of the checkpoint.

    Attributes:
        save_dir: the argument.
        path: where DeepSpeed and its tools look for the checkpoint.
        staging: where files are written.
    """

    def __init__(self, save_dir: str, tag: str) -> None:
        self.save_dir = os.path.abspath(save_dir)
        self.path = os.path.abspath(os.path.join(save_dir, tag))
        self.staging = self.path + _STAGING
        self._replaced = self.path + _REPLACED
        self._replaces = False

    def require_savable(self) -> None:
        """Refuse a tag whose folder cannot be replaced as a whole.

        Raises:
            CheckpointError: the tag does not name a separate folder inside `save_dir`.
        """
        inside = os.path.relpath(self.path, self.save_dir)
        if inside == os.curdir or inside.split(os.sep)[0] == os.pardir:
            raise CheckpointError(
                f"the tag names the folder {self.path}, which is not inside the checkpoint folder {self.save_dir}: "
                "use a tag without '..'"
            )
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(f"{self.path} is not a folder: save elsewhere or under another tag")

    def require_loadable(self) -> None:
        """Refuse a tag without a save, such as after a first save that was interrupted.

        Raises:
            CheckpointError: the folder does not exist, or has no model file.
        """
        if not os.path.isdir(self.path) or not any(map(_is_of_model, os.listdir(self.path))):
            raise CheckpointError(f"{self.path} holds no checkpoint: load another one by its tag")

    def aside(self, path: str) -> str:
        """Path to which a file of this checkpoint is written."""
        inside = os.path.relpath(path, self.path)
        return os.path.abspath(path) if inside.startswith(os.pardir) else os.path.normpath(f"{self.staging}/{inside}")

    # -- saving ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Create an empty staging folder; remove what interrupted saves have left."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._clear()
        os.mkdir(self.staging)
        _in_use.add(self.staging)
        self._clear_others()

    def _clear(self) -> None:
        """Remove what is left of an interrupted save under this tag; complete the save if it is whole."""
        self.finish_swap()
        _files.remove_tree(self.staging)
        self._drop_replaced()

    def _clear_others(self) -> None:
        """Remove what is left of interrupted saves under other tags, as far as possible."""
        parent = os.path.dirname(self.path)
        now = os.stat(self.staging).st_mtime  # by the clock of the file system, which may be that of another host
        for name in os.listdir(parent):
            if not name.endswith((_STAGING, _REPLACED)):
                continue
            other = CheckpointFolder(parent, name.removesuffix(_STAGING).removesuffix(_REPLACED))
            with contextlib.suppress(OSError):  # its job is alive and has changed it now, or it is another user's
                if other.staging not in _in_use and other._last_written() < now - _QUIET_SECONDS:
                    other._clear()

    def _last_written(self) -> float:
        """When anything under the tag's three names was written."""
        times = [0.0]
        for folder in (self.staging, self.path, self._replaced):  # a swap that happens now is seen under one of them
            if os.path.isdir(folder):
                paths = [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]
                times += [os.stat(path).st_mtime for path in paths]
        return max(times)

    def mark(self, save_id: str) -> None:
        """Write the save's id to the staging folder."""
        _files.replace_file(os.path.join(self.staging, _MARKER), json.dumps({"save_id": save_id}) + "\n")

    def swap(self) -> None:
        """Put the staging folder in place. Call it when every rank of every node has written its files."""
        self._replaces = os.path.lexists(self.path)
        if self._replaces:
            os.rename(self.path, self._replaced)
        try:
            _files.rename(self.staging, self.path)
        except FileNotFoundError:
            if not os.path.lexists(self.path):  # else another job that reads the tag has completed the swap
                raise

    def end(self) -> None:
        """Remove the older save. Call it when every node has swapped."""
        _in_use.discard(self.staging)
        self._drop_replaced()

    def give_up(self, save_id: str) -> None:
        """Undo the save `save_id` as far as possible; the next save or load does the rest.

        If there was an older save and it is gone, the new one is the only copy and stays.
        """
        _in_use.discard(self.staging)
        with contextlib.suppress(OSError, CheckpointError):
            has_older = os.path.lexists(self._replaced)
            if _save_id(self.path) == save_id and (has_older or not self._replaces):
                os.rename(self.path, self.staging)
            if has_older and not os.path.lexists(self.path):
                _files.rename(self._replaced, self.path)
            if os.path.lexists(self.path) or not self._replaces:
                _files.remove_tree(self.staging)

    def _drop_replaced(self) -> None:
        """Remove the older save; files that others have added to it move to the new one."""
        if not os.path.lexists(self._replaced):
            return
        for name in os.listdir(self._replaced) if not os.path.islink(self._replaced) else ():
            target = os.path.join(self.path, name)
            if name != _MARKER and not name.endswith(_STATES) and not os.path.lexists(target):
                os.rename(os.path.join(self._replaced, name), target)
        _files.sync_folder(self.path)
        _files.remove_tree(self._replaced)

    # -- after a crash --------------------------------------------------------------------------------------------

    def finish_swap(self) -> None:
        """Complete a swap that was interrupted between its two renames."""
        if not os.path.lexists(self.path) and os.path.lexists(self._replaced):
            complete = os.path.lexists(self.staging)
            _files.rename(self.staging if complete else self._replaced, self.path)

    def state(self) -> FolderState:
        """The save ids under the tag's three names."""
        return FolderState(_save_id(self.path), _save_id(self.staging), _save_id(self._replaced))

    def settle(self, save_id: str | None) -> None:
        """Put the save `save_id`, chosen by `choose_save`, under the tag's name."""
        state = self.state()
        if state.saved == save_id:
            return
        if state.staged == save_id:
            self.swap()
        else:
            assert state.replaced == save_id, "choose_save chooses a save that every node has"
            _files.remove_tree(self.path)
            _files.rename(self._replaced, self.path)


def _is_of_model(name: str) -> bool:
    return name.endswith(f"model{_STATES}")


def _save_id(folder: str) -> str | None:
    if not os.path.isdir(folder):
        return None
    try:
        with open(os.path.join(folder, _MARKER), encoding="utf-8") as file:
            return str(json.loads(file.read(1000))["save_id"])
    except FileNotFoundError:
        return UNKNOWN
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{os.path.join(folder, _MARKER)} is damaged ({error}): load another checkpoint by its tag"
        ) from None
