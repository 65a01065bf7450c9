"""Writes and reads checkpoint files on all ranks together: all succeed or none does."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.adapter.saved_checkpoint import SAVED_NAMES
from deepspeed_ext.adapter.upstream import TorchCheckpointEngine
from deepspeed_ext.checkpoint.file import advised, marked, reading, save_id_of, unmarked
from deepspeed_ext.checkpoint.folder import UNKNOWN, CheckpointFolder, choose_save
from deepspeed_ext.checkpoint.skeleton import Hole, SkeletonError, fill_holes, write_skeleton
from deepspeed_ext.checkpoint.sums import checking
from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import (
    DeferredError,
    RankGroup,
    agreed,
    require_same_plan,
    together,
)
from deepspeed_ext.runtime.words import LOAD_ANOTHER
from deepspeed_ext.zenflow.step.coded_moments import CodedMoments

__all__ = ["JointCheckpointEngine"]

_LATEST_BYTES = 4096


class JointCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files, saved by all ranks or by none.

    DeepSpeed calls `create`, `makedirs` and `save` between its own collectives, then `commit` on
    every rank. So an error is kept until `commit`, which raises it on all ranks. Until then the
    files lie in a staging folder. `commit` replaces an older save under the same tag with that
    folder (see `checkpoint.folder`) and updates ``latest`` last. When `commit` returns, the
    checkpoint is on disk.

    Tensors are written from their own memory, without a copy on the host.

    Every file says which save and which file it is (`checkpoint.file`), and `load` rejects others.

    DeepSpeed also saves a model alone through this class, to a folder that the user names, without
    `begin_save`. Such a save writes that file in place; its errors are raised on all ranks, too.

    Args:
        config_params: as for DeepSpeed's class.
        ranks: all ranks that save and load; each calls `load` equally often.
        leads: whether this rank creates and renames folders. One rank does, or one per node if
            checkpoints are on node-local storage.
        coded: decodes moments while they are written; None: they are not encoded.

    Attributes:
        kept: the first error of this rank since `begin_save`.
        maps_files: whether `load` memory-maps tensors instead of reading them.
    """

    maps_files = False

    def __init__(
        self, config_params: Any, ranks: RankGroup, leads: bool, coded: CodedMoments | None = None
    ) -> None:
        super().__init__(config_params)
        self._coded = coded
        self._ranks = ranks
        self._leads = leads
        self._is_begun = False
        self._folder: CheckpointFolder | None = None
        self._save_id = UNKNOWN
        self._loaded_id: str | None = None
        self._names_latest = False
        self.kept = DeferredError()

    # -- saving ------------------------------------------------------------------------------------

    def begin_save(self, names_latest: bool) -> None:
        """Prepare a save; call this before any other method of it.

        Args:
            names_latest: whether `commit` updates ``latest``; if so, DeepSpeed must not.
        """
        self.break_off()
        self._is_begun, self._names_latest = True, names_latest
        self.kept.take()

    def break_off(self) -> None:
        """Give up a save that was begun and not committed, for instance after Ctrl-C. No
        collective."""
        folder, self._folder, self._is_begun = self._folder, None, False
        if folder is not None and self._leads:
            folder.give_up()

    def create(self, info: Any) -> None:
        """Begin a save. A collective.

        Raises:
            CheckpointError: on every rank, if the folders cannot be created; nothing has changed.
            PlanMismatchError: on every rank, if the ranks give different tags.
        """
        super().create(info)
        if not self._is_begun:
            self.kept.take()
            return
        require_same_plan("the tag of a checkpoint", info.tag, self._ranks)
        self._save_id = self._ranks.broadcast(uuid.uuid4().hex)
        what = f"checkpoint {info.tag!r} was not saved"
        with self._all(what):
            self.kept.raise_here()  # an error from creating the folder of all tags
            folder = CheckpointFolder(info.save_dir, info.tag, SAVED_NAMES, self._save_id)
            folder.require_savable()
        try:
            self._recover(folder)
        except CheckpointError as error:  # its remedy is for a load
            told = CheckpointError(f"{what}: {error}. To go on: save under another tag")
            raise agreed(told, self._ranks) from error
        self._folder = folder  # before it begins, for `break_off`
        with self._all(what):
            if self._leads:
                folder.begin()

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed must clone the weights of experts on the host before it saves them,
        because they share one flat buffer. Not on an accelerator, where `write_skeleton` gives each
        its own storage in the file."""
        return self._folder is None or get_accelerator().device_name() == "cpu"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self.kept.deferring_errors():
            super().makedirs(self._aside(path), exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        with self.kept.deferring_errors():
            aside = self._aside(path)
            if self._folder is not None and isinstance(state_dict, dict):
                state_dict = marked(state_dict, self._save_id, path)
            self._write(state_dict, aside)

    def _write(self, content: Any, path: str) -> None:
        """Write a file of a checkpoint, or a model alone."""
        try:
            holes = write_skeleton(content, path)
        except SkeletonError:
            super().save(content if self._folder is None else self._plain(content, path), path)
        else:
            fill_holes(path, [self._decoding(hole) for hole in holes])
        files.sync_file(path)
        files.sync_folder(os.path.dirname(path))

    def _plain(self, content: Any, path: str) -> Any:
        """`content` with all tensors on the host."""
        if self._coded is not None:
            self._coded.show()
        on_host = tree_map_only(torch.Tensor, _on_host, unmarked(content))
        return marked(on_host, self._save_id, path) if isinstance(on_host, dict) else on_host

    def _decoding(self, hole: Hole) -> Hole:
        """The hole, which decodes its values if they are encoded moments."""
        moment = None if self._coded is None else self._coded.behind(hole.values)
        return hole if moment is None else replace(hole, parts=moment.decoded)

    def _aside(self, path: str) -> str:
        return os.path.abspath(path) if self._folder is None else self._folder.aside(path)

    def commit(self, info: Any) -> bool:
        """Make the saved files the checkpoint, on all ranks. A collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write. Training can continue, and
                existing checkpoints are unchanged.
        """
        if self._folder is None:
            with self._all("the model was not saved"):
                self.kept.raise_here()
        else:
            self._complete(info, self._folder)
        self._folder, self._is_begun = None, False
        return super().commit(info)

    def _complete(self, info: Any, folder: CheckpointFolder) -> None:
        """Make the content of the staging folder the checkpoint. A collective. If an exception
        interrupts it between its agreements, it can be called again."""
        try:
            what = f"checkpoint {info.tag!r} was not saved"
            with self._all(what):
                self.kept.raise_here()
            # on every node before the first swap, so that a crash between swaps loses nothing
            with self._all(what):
                if self._leads:
                    folder.mark()
            with self._all(what):
                if self._leads:
                    folder.swap()
        except DeepSpeedExtError:
            if self._leads:
                folder.give_up()
            raise
        with self._all(
            f"checkpoint {info.tag!r} was saved, but finishing the save failed",
            "load it by its tag",
        ):
            if self._leads:
                folder.end()
            self._name_latest(folder, info.tag)

    def _name_latest(self, folder: CheckpointFolder, tag: str) -> None:
        if self._names_latest and self._ranks.rank == 0:
            files.replace_file(os.path.join(folder.save_dir, "latest"), tag)

    @contextmanager
    def _all(self, what: str, remedy: str = "") -> Iterator[None]:
        """`together`, with `what` before the message and `remedy` after it. Without `remedy`, the
        failing rank says what to do."""
        try:
            with together(self._ranks, CheckpointError), nullcontext() if remedy else advised():
                yield
        except DeepSpeedExtError as error:
            ending = f". To go on: {remedy}" if remedy else ""
            raise agreed(type(error)(f"{what}: {error}{ending}"), self._ranks) from error

    # -- loading -----------------------------------------------------------------------------------

    def begin_load(self, load_dir: str, tag: Any) -> str | None:
        """Find the checkpoint to load, and complete a save that a crash interrupted. A collective.

        Args:
            load_dir: the folder of all tags.
            tag: the tag; None: the one named by the file ``latest``.

        Returns:
            The tag; None if there is no ``latest``.

        Raises:
            CheckpointError: on every rank, if ``latest`` cannot be read or there is no complete
                save under the tag.
        """
        with together(self._ranks, CheckpointError):
            tag = _latest(load_dir) if tag is None else str(tag)
        tag = next((found for found, _ in self._ranks.distinct(tag) if found is not None), None)
        if tag is None:
            return None
        with together(self._ranks, CheckpointError):
            folder = CheckpointFolder(load_dir, tag, SAVED_NAMES)
        self._loaded_id = self._recover(folder) or None
        with together(self._ranks, CheckpointError):
            if self._leads:
                folder.require_loadable()
        return tag

    def _recover(self, folder: CheckpointFolder) -> str | None:
        """Put the same save under the tag on every node; return its id."""
        with together(self._ranks, CheckpointError):
            if self._leads:
                folder.finish_swap()
            state = folder.state() if self._leads else None
        # usually equal on all nodes; then nothing else is exchanged
        first = self._ranks.broadcast(state)
        states = [
            each
            for each, _ in self._ranks.distinct(state if self._leads else first)
            if each is not None
        ]
        with together(self._ranks, CheckpointError):
            save_id = choose_save(states)
            if state is not None:
                folder.settle(state, save_id)
        return save_id

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file. A collective.

        Raises:
            CheckpointError: on every rank, if any rank could not read its file, or a file belongs
                to another save. Load another checkpoint before training on.
        """
        with together(self._ranks, CheckpointError):
            with reading(path), checking(path):
                content = self._read(path, map_location)
            save_id, content = save_id_of(content, path), unmarked(content)
            if save_id != (expected := self._loaded_id or save_id):
                raise CheckpointError(
                    f"{path} is of save {save_id}, expected {expected}: the folder holds files of "
                    f"different saves: {LOAD_ANOTHER}"
                )
            self._loaded_id = expected
        return content

    def _read(self, path: str, map_location: Any) -> Any:
        """The content of a file."""
        if not self.maps_files:
            return super().load(path, map_location)
        return torch.load(path, map_location=map_location, mmap=True, weights_only=False)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.detach().cpu()


def _latest(load_dir: str) -> str | None:
    path = os.path.join(load_dir, "latest")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        tag = file.read(_LATEST_BYTES).strip()
    if not tag:
        raise CheckpointError(
            f"{path} is empty, expected a tag: pass the tag of a checkpoint to load"
        )
    return tag
