"""Writes checkpoint files on all ranks together: all succeed or none does. A save may go on while
training continues."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from deepspeed_ext.adapter.saved_checkpoint import MODEL_FILES
from deepspeed_ext.adapter.upstream import TorchCheckpointEngine
from deepspeed_ext.checkpoint.file import ROOM, advised, marked
from deepspeed_ext.checkpoint.folder import UNKNOWN, CheckpointFolder, choose_save
from deepspeed_ext.checkpoint.skeleton import Hole, SkeletonError, fill_holes, write_skeleton
from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.backend import get_accelerator, local_world_size
from deepspeed_ext.runtime.log import logger, one_line
from deepspeed_ext.runtime.proc import available_host_bytes
from deepspeed_ext.runtime.process import OwnProcess
from deepspeed_ext.runtime.ranks import (
    DeferredError,
    RankGroup,
    agreed,
    require_same_plan,
    together,
)
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.state_store import StateStore
from deepspeed_ext.zenflow.worker.messages import ArenaWrite, FilePart, Patience

LONGEST_MEETING_SECONDS = 30.0
_WRITE_SECONDS = 3600.0
"""Timeout for one part of a file: a file system may stall for minutes while it fails over. The
worker's timeout applies instead if it is longer, or once a step waits for the file."""


class JointCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files, saved by all ranks or by none.

    DeepSpeed calls `create`, `makedirs` and `save` between its own collectives, then `commit` on
    every rank. So an error is kept until `commit`, which raises it on all ranks. Until then the
    files lie in a staging folder. `commit` replaces an older save under the same tag with that
    folder (see `checkpoint.folder`) and updates ``latest`` last. When `commit` returns, the
    checkpoint is on disk.

    No tensor is copied on the host: `save` writes a file without the bytes of its tensors
    (`checkpoint.skeleton`), the worker writes those in its arena, and this process the others from
    their own memory.

    With `continues`, `commit` returns at once. The worker writes before any pass that is submitted
    later, so a step that needs one waits; a thread writes copies of the other tensors. `finish`
    gives the complete checkpoint its name; the engine calls it after the first step at which all
    ranks have written everything, and when the engine or the process ends.

    Every file says which save and which file it is (`checkpoint.file`); `Load` reads them.

    DeepSpeed also saves a model alone through this class, to a folder that the user names, without
    `begin_save`. Such a save writes that file in place; its errors are raised on all ranks, too.

    Args:
        leads: whether this rank creates and renames folders. One rank does, or one per node if
            checkpoints are on node-local storage.
        state: p, m and v, which the worker writes; None: there is no worker. Nothing is in flight
            while DeepSpeed saves.

    Attributes:
        continues: whether training continues while a save is written; `leads` is then true on one
            rank only.
        kept: the first error of this rank since `begin_save`.
    """

    def __init__(
        self,
        config_params: Any,
        ranks: RankGroup,
        leads: bool,
        state: StateStore | None = None,
        *,
        continues: bool = False,
    ) -> None:
        super().__init__(config_params)
        self._ranks = ranks
        self._leads = leads
        self._state = state
        self.continues = continues
        self._home = OwnProcess("a checkpoint that is being saved")
        self._is_begun = False
        self._folder: CheckpointFolder | None = None
        self._save_id = UNKNOWN
        self._names_latest = False
        self._jobs: list[Callable[[], None]] = []
        self._saving: _Saving | None = None
        self._is_watching_exit = False
        self.kept = DeferredError()

    # -- saving ------------------------------------------------------------------------------------

    def begin_save(self, names_latest: bool) -> None:
        """Prepare a save; call this before any other method of it. Completes a save in progress: a
        collective if there is one. `names_latest`: `commit` updates ``latest``, not DeepSpeed."""
        self.finish()
        self.break_off()
        self._is_begun, self._names_latest = True, names_latest
        self.kept.take()
        # registered after all other atexit functions, so it runs first
        if self.continues and not self._is_watching_exit:
            self._is_watching_exit = True
            atexit.register(_finish_at_exit, weakref.ref(self))
            # Before Python 3.13, processes forked by multiprocessing do not run atexit functions.
            Finalize(None, _finish_at_exit, args=(weakref.ref(self),), exitpriority=0)

    @contextlib.contextmanager
    def saving(self, names_latest: bool) -> Iterator[bool]:
        """Wrap a save, which an exception undoes; see `begin_save`. Yields whether DeepSpeed must
        update ``latest``: never."""
        self.begin_save(names_latest)
        try:
            yield False
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Give up a save that was begun and not committed, for instance after Ctrl-C. No
        collective."""
        folder, self._folder, self._is_begun, self._jobs = self._folder, None, False, []
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
        with _all(self._ranks, what):
            self.kept.raise_here()  # an error from creating the folder of all tags
            folder = CheckpointFolder(info.save_dir, info.tag, MODEL_FILES, self._save_id)
            folder.require_savable()
        try:
            self._recover(folder)
        except CheckpointError as error:  # its remedy is for a load
            told = CheckpointError(f"{what}: {error}. To go on: save under another tag")
            raise agreed(told, self._ranks) from error
        self._folder = folder  # before it begins, for `break_off`
        with _all(self._ranks, what):
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
        numbers: list[int] = []
        try:
            holes = write_skeleton(content, path)
        except SkeletonError as error:
            if self.continues and self._folder is not None:
                logger.warning(
                    f"rank {self._ranks.rank}: training waits while a file is written: {error}"
                )
            if self._state is not None and self._folder is not None:
                self._state.drain(takes_over=False)
            super().save(content, path)
            holes = []
        if self._folder is not None and self._state is not None:
            numbers, holes = _submit_arena(holes, path, self._state)
        if not self.continues or self._folder is None:
            self._finish_file(path, holes, numbers)
            return
        needed = sum(hole.values.nbytes for hole in holes)
        if needed > available_host_bytes() // local_world_size():
            fill_holes(path, holes)
            holes = []
        copies = [replace(hole, values=hole.values.detach().to("cpu", copy=True)) for hole in holes]
        self._jobs.append(partial(self._finish_file, path, copies, numbers))

    def _finish_file(self, path: str, holes: list[Hole], numbers: Sequence[int]) -> None:
        """Fill `holes`, wait until the worker has written its parts, the submissions `numbers`,
        then sync the file."""
        with advised():
            fill_holes(path, holes)
            holes.clear()
            for number in numbers:
                assert self._state is not None
                self._state.link.process.wait_for(number, _WRITE_SECONDS)
                if (why := self._state.link.process.failed_write(number)) is not None:
                    raise CheckpointError(
                        f"the optimizer process could not write {path}: {why}. To go on: {ROOM}"
                    )
            files.sync_file(path)
            files.sync_folder(os.path.dirname(path))

    def _aside(self, path: str) -> str:
        return os.path.abspath(path) if self._folder is None else self._folder.aside(path)

    def commit(self, info: Any) -> bool:
        """Make the saved files the checkpoint, on all ranks, or let the save go on. A collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write. Training can continue, and
                existing checkpoints are unchanged.
        """
        if self._folder is not None and self.continues:
            assert self._state is not None
            jobs, self._jobs = self._jobs, []
            written = _begin_writing(jobs)
            self._saving = _Saving(self._save_id, info, self._folder, written, self._state.link)
            self._folder, self._is_begun = None, False
            return True
        if self._folder is None:
            with _all(self._ranks, "the model was not saved"):
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
            with _all(self._ranks, what):
                self.kept.raise_here()
            # on every node before the first swap, so that a crash between swaps loses nothing
            for make_it in (folder.mark, folder.swap):
                with _all(self._ranks, what):
                    if self._leads:
                        make_it()
        except DeepSpeedExtError:
            if self._leads:
                folder.give_up()
            raise
        what = f"checkpoint {info.tag!r} was saved, but finishing the save failed"
        with _all(self._ranks, what, "load it by its tag"):
            if self._leads:
                folder.end()
            if self._names_latest and self._ranks.rank == 0:
                files.replace_file(os.path.join(folder.save_dir, "latest"), info.tag)

    # -- a save that goes on -----------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress; equal on all ranks."""
        return self._saving is not None

    @property
    def has_written(self) -> bool:
        """Whether this rank has written its files, or could not."""
        return self._saving is None or self._saving.written.done()

    def finish_if_written(self) -> None:
        """Complete the save if every rank has written its files. A collective if a save is in
        progress.

        Raises:
            CheckpointError: as from `finish`.
        """
        if self.is_saving and self._ranks.all(self.has_written):
            self.finish()

    def finish(self, *, ends: bool = False) -> None:
        """Wait for the save in progress, if any, and complete it. A collective if there is one. If
        an exception such as Ctrl-C interrupts this, the save continues, and the next call completes
        it.

        Args:
            ends: whether the engine ends, perhaps on this rank alone. If other ranks do not come
                too, the save is given up.

        Raises:
            CheckpointError: on every rank, if any rank could not write. Training can continue, and
                existing checkpoints are unchanged.
        """
        self._home.require()
        if (saving := self._saving) is None:
            return
        all_end = not ends
        if ends:  # ranks meet before they wait for files, which may take long
            with contextlib.suppress(RuntimeError, ValueError):  # the process group has ended
                all_end = self._ranks.meet(f"end of save {saving.id}", LONGEST_MEETING_SECONDS)
        saving.wait(self.kept)
        try:
            if not all_end:
                if self._leads:
                    saving.folder.give_up()
                raise CheckpointError(
                    f"checkpoint {saving.info.tag!r} was not saved: not all ranks came to the end "
                    f"of training within {LONGEST_MEETING_SECONDS:g} s. They have ended before, or "
                    "do not call engine.destroy(), which every rank must before it destroys the "
                    "process group"
                )
            self._complete(saving.info, saving.folder)
        except DeepSpeedExtError:
            self._saving = None
            self.kept.take()
            raise
        self._saving = None
        if self._leads:
            logger.info(
                f"checkpoint {saving.info.tag!r} is complete "
                f"{time.perf_counter() - saving.begin:.2f} s after training went on; steps waited "
                f"{saving.link.write_wait_seconds - saving.waited:.2f} s for it"
            )

    # -- loading -----------------------------------------------------------------------------------

    def begin_load(self, load_dir: str, tag: Any) -> str | None:
        """Find the checkpoint to load, by its tag or by ``latest``, and complete a save that is in
        progress or that a crash interrupted. Return the tag; None: there is no ``latest``. A
        collective.

        Raises:
            CheckpointError: on every rank, if ``latest`` cannot be read or there is no complete
                save under the tag.
        """
        self.finish()
        with together(self._ranks, CheckpointError):
            tag = _latest(load_dir) if tag is None else str(tag)
        tag = next((found for found, _ in self._ranks.distinct(tag) if found is not None), None)
        if tag is None:
            return None
        with together(self._ranks, CheckpointError):
            folder = CheckpointFolder(load_dir, tag, MODEL_FILES)
        self._recover(folder)
        with together(self._ranks, CheckpointError):
            if self._leads:
                folder.require_loadable()
        return tag

    def _recover(self, folder: CheckpointFolder) -> None:
        """Put the same save under the tag on every node."""
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


@dataclass
class _Saving:
    """A save that goes on, in DeepSpeed's words `info`.

    Attributes:
        written: done once this rank has written its files, or could not.
        begin, waited: when training went on, and how long its steps had waited by then.
    """

    id: str
    info: Any
    folder: CheckpointFolder
    written: Future[None]
    link: WorkerLink

    def __post_init__(self) -> None:
        self.begin, self.waited = time.perf_counter(), self.link.write_wait_seconds

    def wait(self, kept: DeferredError) -> None:
        """Wait for this rank's files, and keep their error. The worker's timeout applies to each
        part that it writes. The whole wait ends before the other ranks' collective times out."""
        within, begin = self.link.longest_wait_seconds, time.monotonic()
        if not self.written.done():
            with kept.deferring_errors():
                self.link.process.wait_for_writes(Patience(within))
        left = max(0.0, within - (time.monotonic() - begin))
        failure: BaseException | None
        try:
            failure = self.written.exception(min(left, threading.TIMEOUT_MAX))
        except FutureTimeout:
            failure = CheckpointError(
                "the checkpoint was not written before the process group's timeout: save less "
                "often or elsewhere, or raise the timeout (DEEPSPEED_TIMEOUT, in minutes)"
            )
        if isinstance(failure, Exception):
            kept.note(failure)


@contextlib.contextmanager
def _all(ranks: RankGroup, what: str, remedy: str = "") -> Iterator[None]:
    """`together`, with `what` before the message and `remedy` after it. Without `remedy`, the
    failing rank says what to do."""
    try:
        with together(ranks, CheckpointError), contextlib.nullcontext() if remedy else advised():
            yield
    except DeepSpeedExtError as error:
        ending = f". To go on: {remedy}" if remedy else ""
        raise agreed(type(error)(f"{what}: {error}{ending}"), ranks) from error


def _submit_arena(
    holes: Sequence[Hole], path: str, state: StateStore
) -> tuple[list[int], list[Hole]]:
    """Submit the holes whose values are in the worker's arena; return the numbers of the
    submissions, and the other holes."""
    parts: list[FilePart] = []
    others: list[Hole] = []
    for hole in holes:
        on_host = hole.values.device.type == "cpu"
        found = state.file_parts(hole.values, hole.offset, hole.crc_offsets) if on_host else None
        others += [hole] if found is None else []
        parts += found or []
    return [state.link.process.submit([ArenaWrite(path, (part,))]) for part in parts], others


def _begin_writing(jobs: list[Callable[[], None]]) -> Future[None]:
    """Call `jobs` in order, in a thread, and empty them, because they hold copies of tensors;
    return their result, or the first error. Python's own executors are no alternative: at exit,
    Python waits for their threads before any code could log or give up."""
    written: Future[None] = Future()
    thread = threading.Thread(
        target=_write_all, args=(jobs, written), name="deepspeed_ext-save", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter's, for any cause
        written.set_exception(
            CheckpointError(f"{error}. To go on: allow this user more threads (ulimit -u)")
        )
    return written


def _write_all(jobs: list[Callable[[], None]], written: Future[None]) -> None:
    try:
        while jobs:
            jobs.pop(0)()
    except Exception as error:
        written.set_exception(error)
    except BaseException as error:
        written.set_exception(CheckpointError(one_line(error)))
    else:
        written.set_result(None)


def _finish_at_exit(engine: weakref.ref[JointCheckpointEngine]) -> None:
    found = engine()
    if found is None or found._saving is None or not found._home.is_here:
        return
    rank, saving = found._ranks.rank, found._saving
    try:
        if not found.has_written:
            logger.warning(f"rank {rank}: exit waits for a checkpoint that is still being written")
        found.finish(ends=True)
    except CheckpointError as error:
        logger.error(str(error))
    except BaseException as error:  # also Ctrl-C: at exit no caller could catch it
        what = f"checkpoint {saving.info.tag!r} was not saved"
        logger.error(f"rank {rank}: {what}: {one_line(error)}")
        if found._leads:
            saving.folder.give_up()
    finally:
        found._saving = None  # both calls at exit come here; what was given up is said once


def _latest(load_dir: str) -> str | None:
    path = os.path.join(load_dir, "latest")
    if not os.path.isfile(path):
        return None
    tag = Path(path).read_text(encoding="utf-8").strip()
    if not tag:
        raise CheckpointError(
            f"{path} is empty, expected a tag: pass the tag of a checkpoint to load"
        )
    return tag
