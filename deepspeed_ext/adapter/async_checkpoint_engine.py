"""Saves checkpoints while training continues: the optimizer process writes p, m and v, a thread
writes copies of the rest."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.util import Finalize
from typing import Any

from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.checkpoint.file import ROOM, advised
from deepspeed_ext.checkpoint.folder import CheckpointFolder
from deepspeed_ext.checkpoint.skeleton import Hole, SkeletonError, fill_holes, write_skeleton
from deepspeed_ext.checkpoint.writer import Writer
from deepspeed_ext.checkpoint.zenflow_state import host_copy
from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError, WorkerError
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.backend import local_world_size
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.proc import available_host_bytes
from deepspeed_ext.runtime.process import OwnProcess
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.step.coded_moments import CodedMoments
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import ArenaWrite, CodedPart, FilePart
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

__all__ = ["AsyncCheckpointEngine"]

_PART_BYTES = 1 << 28
"""The worker answers after each part of this many bytes, so every wait is bounded even if the disk
is slow."""
_WRITTEN = "written-by-rank-"
_POLL_SECONDS = 0.05
_SILENCE_SECONDS = 30.0
_WRITE_SECONDS = 3600.0
"""Timeout for one part of a file while training continues: a file system may stall for minutes
while it fails over. The worker's timeout applies instead if it is longer, or once something waits
for the file."""


class AsyncCheckpointEngine(JointCheckpointEngine):
    """A `JointCheckpointEngine` that continues a save after `commit` has returned.

    `save` writes a file without the bytes of its tensors (`checkpoint.skeleton`). The worker writes
    those in its arena before any pass that is submitted later: nothing is copied, but a step that
    needs a later pass waits. A thread writes copies of other tensors and syncs the file. `finish`
    gives the complete checkpoint its name; the engine calls it after the first step at which all
    ranks have written everything. If there is no such step, `finish_alone` does it when the engine
    or the process ends.

    Args:
        config_params, ranks, leads, coded: as for `JointCheckpointEngine`; `leads` is true on one
            rank only.
        link: connection to the worker. Nothing is in flight while DeepSpeed saves.
    """

    def __init__(
        self,
        config_params: Any,
        ranks: RankGroup,
        leads: bool,
        link: WorkerLink,
        coded: CodedMoments | None = None,
    ) -> None:
        super().__init__(config_params, ranks, leads, coded)
        self._link = link
        self._writer: Writer | None = None
        self._files: list[Future[None]] = []
        self._saving: tuple[Any, CheckpointFolder] | None = None
        self._begin = self._waited = 0.0
        self._home = OwnProcess("a checkpoint that is being saved")
        self._is_watching_exit = False

    def begin_save(self, names_latest: bool) -> None:
        """Complete the previous save, then begin. A collective if a save is in progress."""
        self.finish()
        super().begin_save(names_latest)
        self._begin, self._waited = time.perf_counter(), self._link.write_wait_seconds
        # registered after all other atexit functions, so it runs first
        if not self._is_watching_exit:
            self._is_watching_exit = True
            atexit.register(_finish_at_exit, weakref.ref(self))
            # Before Python 3.13, processes forked by multiprocessing do not run atexit functions.
            Finalize(None, _finish_at_exit, args=(weakref.ref(self),), exitpriority=0)

    def begin_load(self, load_dir: str, tag: Any) -> str | None:
        self.finish()
        return super().begin_load(load_dir, tag)

    def _write(self, content: Any, path: str) -> None:
        if self._folder is None:  # a model alone
            super()._write(content, path)
            return
        try:
            holes = write_skeleton(content, path)
        except SkeletonError as error:
            logger.warning(
                f"rank {self._ranks.rank}: training waits while a file is written: {error}"
            )
            super()._write(content, path)
            return
        numbers, others = _submit_arena(holes, path, self._link, self._coded)
        try:
            self._writer = self._writer or Writer()
        except RuntimeError as error:  # the interpreter's, for any cause
            logger.warning(
                f"rank {self._ranks.rank}: training waits while "
                f"a file is written: {error}. To go on: allow this user more threads (ulimit -u)"
            )
            _finish_file(path, others, self._link.process, numbers)
            return
        if (
            sum(hole.values.nbytes for hole in others)
            > available_host_bytes() // local_world_size()
        ):
            fill_holes(path, others)
            others = []
        copies = [Hole(host_copy(hole.values), hole.offset, hole.crc_offsets) for hole in others]
        self._files.append(
            self._writer.submit(_finish_file, path, copies, self._link.process, numbers)
        )

    def commit(self, info: Any) -> bool:
        """Return while the save continues. A model saved alone is complete when this returns, as in
        the base class."""
        if self._folder is None:
            return super().commit(info)
        self._saving, self._folder, self._is_begun = (info, self._folder), None, False
        self._end_writer()
        return True

    def break_off(self) -> None:
        if self._folder is not None:
            self._files = []  # files still being written are in a folder of their own
            self._end_writer()
        super().break_off()

    def _end_writer(self) -> None:
        """Let the thread end after its last file."""
        if self._writer is not None:
            self._writer.end()
            self._writer = None

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress; equal on all ranks."""
        return self._saving is not None

    def finish_if_written(self) -> None:
        """Complete the save if every rank has written its files. A collective if a save is in
        progress.

        Raises:
            CheckpointError: as from `finish`.
        """
        if self.is_saving and self._ranks.all(self.has_written):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and complete it. A collective if there is one. If
        an exception such as Ctrl-C interrupts this, the save continues, and the next call completes
        it.

        Raises:
            CheckpointError: on every rank, if any rank could not write. Training can continue, and
                existing checkpoints are unchanged.
        """
        self._home.require()
        if self._saving is not None:  # the other ranks' collective must not time out first
            with self._ending(self._saving[0], within_seconds=self._link.longest_wait_seconds):
                self._complete(*self._saving)

    def finish_alone(self) -> None:
        """Like `finish` without a collective, for the end of an engine: other ranks may be gone.
        Each rank reports in a file, and the leading one gives up `_SILENCE_SECONDS` after the
        others stop making progress.

        Raises:
            CheckpointError: on the leading rank, if any rank could not write.
        """
        self._home.require()
        if self._saving is None:
            return
        info, folder = self._saving
        with self._ending(info, within_seconds=math.inf):
            if not self._leads:
                with contextlib.suppress(OSError):  # without this file, the leading rank gives up
                    report = os.path.join(folder.staging, f"{_WRITTEN}{self._ranks.rank}")
                    files.replace_file(report, str(self.kept.error or ""))
                return
            try:
                with advised():
                    if not folder.is_marked:  # otherwise an interrupted call goes on
                        self.kept.raise_here()
                        self._wait_for_reports(folder.staging)
                        folder.mark()
                    _remove_reports(folder.staging)
                    folder.swap()
            except DeepSpeedExtError as error:
                folder.give_up()
                raise CheckpointError(f"checkpoint {info.tag!r} was not saved: {error}") from error
            try:
                folder.end()
                self._name_latest(folder, info.tag)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {info.tag!r} was saved, but finishing the save failed: {error}. "
                    "To go on: load it by its tag"
                ) from error

    def _wait_for_reports(self, staging: str) -> None:
        """Wait until all other ranks have reported that they have written."""
        wanted = {
            f"{_WRITTEN}{rank}" for rank in range(self._ranks.size) if rank != self._ranks.rank
        }
        last, silent_since = None, time.monotonic()
        while missing := wanted - {*(names := os.listdir(staging))}:
            if (seen := sorted(_statuses(staging, names))) != last:
                last, silent_since = seen, time.monotonic()
            if time.monotonic() - silent_since > _SILENCE_SECONDS:
                ranks = sorted(int(name.removeprefix(_WRITTEN)) for name in missing)
                raise CheckpointError(
                    f"ranks {ranks} have written nothing for {_SILENCE_SECONDS:g} s: they have "
                    "ended, or do not call engine.destroy(), which every rank must when training "
                    "ends"
                )
            time.sleep(_POLL_SECONDS)
        reports = {}
        for name in sorted(wanted):
            with open(os.path.join(staging, name), encoding="utf-8") as file:
                reports[name.removeprefix(_WRITTEN)] = file.read()
        if problems := [f"rank {rank}: {report}" for rank, report in reports.items() if report]:
            raise CheckpointError("; ".join(problems))

    def lose(self, why: str) -> None:
        """Give up the save in progress, if any, and log it. No collective."""
        saving, self._saving, self._files = self._saving, None, []
        if saving is not None:
            if self._leads:
                saving[1].give_up()
            logger.error(
                f"rank {self._ranks.rank}: checkpoint {saving[0].tag!r} was not saved: {why}"
            )

    @contextlib.contextmanager
    def _ending(self, info: Any, *, within_seconds: float) -> Iterator[None]:
        """Wait for this rank's files and keep their error; the block completes the save. After an
        exception that is not the save's own, such as Ctrl-C, a later call completes it.

        The worker's timeout applies to each part that it writes, `within_seconds` to the whole
        wait.
        """
        begin = time.monotonic()
        if not self.has_written:
            try:
                self._link.process.wait_for_writes(Patience(within_seconds))
            except WorkerError as error:
                self.kept.note(error)
        for file in self._files:
            left = within_seconds - (time.monotonic() - begin)
            # kept, not raised: an exception raised here counts as not the save's own
            failure = _failure_of(file, left)
            if failure is not None:
                self.kept.note(
                    failure if isinstance(failure, Exception) else CheckpointError(repr(failure))
                )
        try:
            yield
        except DeepSpeedExtError:
            self._saving, self._files = None, []
            self.kept.take()
            raise
        self._saving, self._files = None, []
        if self._leads:
            logger.info(
                f"checkpoint {info.tag!r} is complete {time.perf_counter() - self._begin:.2f} s "
                "after its save began; steps waited "
                f"{self._link.write_wait_seconds - self._waited:.2f} s for it"
            )

    @property
    def has_written(self) -> bool:
        """Whether this rank has written its files, or could not."""
        return all(file.done() for file in self._files)


def _failure_of(file: Future[None], within_seconds: float) -> BaseException | None:
    """Why a file could not be written, or not within `within_seconds`; None: it is on disk."""
    try:
        return file.exception(max(0.0, within_seconds) if math.isfinite(within_seconds) else None)
    except FutureTimeout:
        return CheckpointError(
            "the checkpoint was not written before the process group's timeout: save less often or "
            "elsewhere, or raise the timeout (DEEPSPEED_TIMEOUT, in minutes)"
        )


def _submit_arena(
    holes: Sequence[Hole], path: str, link: WorkerLink, coded: CodedMoments | None
) -> tuple[list[int], list[Hole]]:
    """Submit the holes whose values are in the worker's arena, as they are or encoded; return the
    numbers of the submissions, and the other holes."""
    parts: list[FilePart | CodedPart] = []
    others: list[Hole] = []
    for hole in holes:
        values, nbytes = hole.values, hole.values.nbytes
        if coded is not None and (moment := coded.behind(values)) is not None:
            size = moment.shown.element_size()
            for span in moment.spans(_PART_BYTES // size):
                offset, continues = hole.offset + size * span.begin, span.begin > 0
                parts.append(
                    CodedPart(
                        moment.kind, moment.partition, span, offset, hole.crc_offsets, continues
                    )
                )
            continue
        place = link.arena.find(values.data_ptr(), nbytes) if values.device.type == "cpu" else None
        if place is None:
            others.append(hole)
            continue
        for begin in range(0, nbytes, _PART_BYTES):
            size = min(_PART_BYTES, nbytes - begin)
            parts.append(
                FilePart(place + begin, size, hole.offset + begin, hole.crc_offsets, begin > 0)
            )
    return [link.process.submit([ArenaWrite(path, (part,))]) for part in parts], others


def _finish_file(
    path: str, holes: list[Hole], process: OptimizerProcess, numbers: Sequence[int]
) -> None:
    """Fill `holes`, wait until the worker has written its parts, then sync the file."""
    with advised():
        fill_holes(path, holes)
        holes.clear()
        for number in numbers:
            process.wait_for(number, _WRITE_SECONDS)
            if (why := process.failed_write(number)) is not None:
                raise CheckpointError(
                    f"the optimizer process could not write {path}: {why}. To go on: {ROOM}"
                )
        files.sync_file(path)
        files.sync_folder(os.path.dirname(path))


def _remove_reports(staging: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # the folder is in place already
        for name in os.listdir(staging):
            if name.startswith(_WRITTEN):
                os.unlink(os.path.join(staging, name))


def _statuses(folder: str, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """What changes while files are written."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            status = os.stat(os.path.join(folder, name))
            yield name, status.st_mtime_ns, status.st_blocks


def _finish_at_exit(engine: weakref.ref[AsyncCheckpointEngine]) -> None:
    found = engine()
    if found is None or not found._home.is_here:
        return
    try:
        if not found.has_written:
            logger.warning(
                f"rank {found._ranks.rank}: exit waits for a checkpoint that is still being written"
            )
        found.finish_alone()
    except CheckpointError as error:
        logger.error(str(error))
    except BaseException as error:  # also Ctrl-C: at exit no caller could catch it
        found.lose(f"{type(error).__name__} {error}".rstrip())
