"""The trainer's connection to its optimizer process: submit work, wait, and raise errors on all
ranks together."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

from deepspeed_ext.cores.host import WorkerPlacement
from deepspeed_ext.errors import DeepSpeedExtError, StateError, WorkerError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.memory import PageLocks
from deepspeed_ext.runtime.process import OwnProcess, is_of_handler
from deepspeed_ext.runtime.ranks import DeferredError, RankGroup, raise_together, together
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.transfers.landing import LandingBuffer
from deepspeed_ext.zenflow.transfers.stream import Predict, Stream
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.messages import ArenaRelay, Patience, Span, WorkerPlan, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

_SHARE_OF_GROUP_TIMEOUT = 0.8
"""The rest allows for other ranks that reached the collective earlier."""


@dataclass(frozen=True)
class WorkerThreads:
    """Where and how a worker runs.

    Attributes:
        placement: its cores; None: inherited.
        count: its threads.
        timeout_seconds: longest time without progress before it counts as failed.
    """

    placement: WorkerPlacement | None
    count: int
    timeout_seconds: float

    def start(self, arena: Arena, plan: ZenFlowPlan) -> OptimizerProcess:
        """Start the worker on this rank's arena, which `plan` describes."""
        chunk = plan.chunk_numel if plan.copies is Copies.BESIDE_STEP else None
        how = self.placement, self.count, library_path(plan.rule.layout.passes), chunk
        return OptimizerProcess(
            arena,
            WorkerPlan(arena.layout, plan.rule.layout, plan.rule.block_size, *how),
            rank=dist.get_rank(),
            timeout_seconds=self.timeout_seconds,
        )


def _told(error: Exception) -> Exception:
    """The error to keep for one that was raised within a step."""
    if not is_of_handler(error):
        return error
    told = StateError(
        f"{type(error).__name__} ({error}), raised by a signal handler, interrupted an optimizer "
        "step or a wait for it: build a new engine, and load the last checkpoint. Let the handler "
        "only set a flag, and check the flag between steps"
    )
    told.__cause__ = error
    return told


class WorkerLink:
    """Creates the arena, starts the worker and communicates with it.

    Args:
        plan: the arena, and what crosses the link.
        buffers: landing buffers of each partition, if copies run beside the next step.
        threads: the worker's threads, their placement, and how long it may make no progress.
        ranks: the ranks that the model is spread over; each builds a link, and an error on one is
            raised on all.

    Attributes:
        home: the process that owns this object.
        arena, process, stream, page_locks, metrics: see their classes.
        is_in_flight: whether an update was handed over and not awaited yet: p, m, v, y and its
            gradients belong to the worker.
        is_unread: whether one has arrived whose per-block array the rule has not read yet.
        write_wait_seconds: total time spent waiting for the worker to write parts of the arena to
            files.
        longest_wait_seconds: longest wait, even with progress, before other ranks' collective would
            time out.

    Raises:
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena.
        WorkerError: the worker does not start, or another rank raised one of these errors.
    """

    arena: Arena
    process: OptimizerProcess
    stream: Stream

    def __init__(
        self,
        plan: ZenFlowPlan,
        buffers: Sequence[LandingBuffer],
        threads: WorkerThreads,
        ranks: RankGroup,
        metrics: Metrics,
    ) -> None:
        self.home = OwnProcess("the optimizer's state")
        self.page_locks = PageLocks()
        self.is_in_flight = self.is_unread = False
        self.write_wait_seconds = 0.0
        self._ranks, self.metrics = ranks, metrics
        self._kept = DeferredError(_told)
        self._gradients = 0
        self._timeout_seconds = threads.timeout_seconds
        self.longest_wait_seconds = _longest_wait_seconds(threads.timeout_seconds, ranks)
        try:
            with together(ranks, WorkerError):
                self.arena = Arena.create(plan.layout)
                self.process = threads.start(self.arena, plan)
                self._carry(plan, buffers)
        except BaseException:
            self.close()
            raise
        if self.process.ready.warning:
            logger.warning(
                f"rank {dist.get_rank()}: the optimizer process {self.process.ready.warning}"
            )

    def _carry(self, plan: ZenFlowPlan, buffers: Sequence[LandingBuffer]) -> None:
        """Build the stream of `plan`, and lock their memory."""
        of_run = plan, self.arena, self.process, buffers
        self.stream = Stream(*of_run, self.metrics.waiting, self._timeout_seconds)
        parts = self.process, self.stream, self.page_locks
        # Runs at `close` or at garbage collection, but not at exit, which frees everything without
        # waiting.
        self._end_copies = weakref.finalize(self, _end_copies, *parts, os.getpid())
        self._end_copies.atexit = False
        # The worker has touched them: locking untouched pages would place them on this process's
        # memory node and clear them in a single thread.
        keys = [spec.key for spec in plan.arena if spec.touched and spec.exchanged]
        self.page_locks.lock([self.arena.tensor(*key) for key in keys])

    def relay(self, plan: ZenFlowPlan, buffers: Sequence[LandingBuffer]) -> None:
        """Switch to `plan`, with fewer elements on the host, in the same memory and worker. Nothing
        may be in flight, and no result that has arrived is read afterwards.

        Raises:
            WorkerError: the worker has failed, or copies do not end.
        """
        if not self.stream.close():
            raise WorkerError(
                "copies between accelerator and host have not ended, so the plan cannot change: "
                "resume from the last checkpoint"
            )
        self._end_copies.detach()
        self.page_locks.unlock()
        layout = self.arena.layout.relaid(plan.arena)
        self.process.submit([ArenaRelay(layout)])
        self.arena.relay(layout)
        self._carry(plan, buffers)

    # Note: [an error of one rank]
    # If a rank raised between two of DeepSpeed's collectives, the others would wait in the next one
    # until the group's timeout. So each part of a step that can fail runs inside
    # `deferring_errors`: the rank keeps its error and goes on to the same collectives, with values
    # that make every rank skip the step (a norm of NaN) or that are not read. The next wait of all
    # ranks together raises the error on each of them. A call outside `deferring_errors` must not be
    # able to fail on one rank alone; tests/unit/faults/test_one_rank_fails.py lists those calls
    # with the reason.

    def deferring_errors(self) -> AbstractContextManager[None]:
        """Wrap this rank's own part of a step; see Note: [an error of one rank]. Until all ranks
        wait together, `failed` is true and work may be skipped."""
        # not kept: that would raise it only after a collective of the parent's group
        self.home.require()
        return self._kept.deferring_errors()

    @property
    def failed(self) -> bool:
        """Whether this rank has kept an error, which the next wait raises on every rank."""
        return self._kept.error is not None

    def depart(
        self,
        tasks: Sequence[WorkerTask],
        *,
        gradients: int,
        gives: Iterable[int] = (),
        predicts: Mapping[int, Predict] = MappingProxyType({}),
    ) -> None:
        """Hand over work on the gradients that `stream` has taken. Does nothing if this rank has
        failed.

        Args:
            tasks: at most one task per partition.
            gradients: number of gradients per task.
            gives: partitions whose weights arrive.
            predicts: see `Stream.depart`.
        """
        self.stream.expect(gives)
        if tasks and not self.failed:
            with self.deferring_errors():
                self.is_in_flight, self.is_unread, self._gradients = True, False, gradients
                self.stream.depart(tasks, predicts)

    def free(self, index: int, span: Span) -> None:
        """Wait, on this rank alone, until the worker has read the gradient of these elements of a
        partition, so that the next one may take its place."""
        if self.stream.are_due and not self.failed:
            with self.deferring_errors(), self.metrics.waiting.measured():
                self.stream.free(index, span, Patience(self.longest_wait_seconds))
        self._lose_if_failed([(index, span)])

    def wait(self) -> Exception | None:
        """Wait for everything in flight on this rank, and write weights that were on their way.
        Even with progress, the wait ends before other ranks' collective times out.

        Returns:
            The kept error, if any, which `raise_deferred` raises on all ranks.
        """
        if not self.failed:
            with self.deferring_errors():
                within = Patience(self.longest_wait_seconds)
                self.write_wait_seconds += self.process.wait_for_writes(within)
                self.metrics.bytes_up += self.stream.complete(within)
                seconds = self.stream.wait(within)
                if self.is_in_flight:
                    self.is_in_flight, self.is_unread = False, True
                    self.metrics.note_worker(seconds, self._gradients)
        self._lose_if_failed()
        return self._kept.error

    def complete(self, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Complete the last step's weights that are used now, on this rank alone; see Note:
        [weights on their way]. If the worker has failed, they are NaN.

        Args:
            parts: partitions, and spans of their elements; None: everything.

        Raises:
            StateError: this is a forked process, whose parent's weights are on their way.
        """
        if not self.stream.are_due:
            return
        self.home.require()
        used = None if parts is None else list(parts)
        if not self.failed:
            # timed only if it waits: the events of a measurement are kept until the next step
            waits = self.metrics.waiting.measured() if self.stream.awaits(used) else nullcontext()
            with self.deferring_errors(), waits:
                within = Patience(self.longest_wait_seconds)
                self.metrics.bytes_up += self.stream.complete(within, used)
        self._lose_if_failed(used)

    def _lose_if_failed(self, parts: Sequence[tuple[int, Span]] | None = None) -> None:
        if self.failed:
            with self.deferring_errors():
                self.stream.lose(parts)

    def wait_together(self) -> None:
        """Wait for everything in flight. A collective.

        Raises:
            WorkerError: on every rank, if any rank's worker has failed, or has ended while idle;
                every later wait raises it again.
        """
        with self.deferring_errors():
            self.wait()
            self.process.require_alive()
        self.raise_deferred()

    def raise_deferred(self) -> None:
        """Raise any rank's kept error on every rank, without waiting for a worker. A collective.

        Raises:
            DeepSpeedExtError: on every rank.
        """
        self.home.require()
        try:
            raise_together(self._ranks, self._kept.error, WorkerError)
        except DeepSpeedExtError as failure:
            self._kept.error = failure
            self.process.close()
            raise

    def close(self) -> None:
        """Stop the worker, and free the arena's memory even if tensors still refer to it, which
        then read as zero. Idempotent, also after a failed start."""
        if hasattr(self, "process"):
            self.process.close()
        if hasattr(self, "_end_copies"):
            self._end_copies()
        if hasattr(self, "arena"):
            self.arena.close()
            if self.home.is_here:
                self.arena.discard()


def _end_copies(
    process: OptimizerProcess, stream: Stream, page_locks: PageLocks, owner_pid: int
) -> None:
    """Unlock memory once no copy is running; if a copy does not end, leave everything that it
    uses."""
    if os.getpid() != owner_pid:  # a forked process must not use the accelerator
        return
    process.close()
    if stream.close():
        page_locks.unlock()
    else:
        page_locks.leave(stream)
        logger.warning(
            "copies between accelerator and host have not ended, perhaps because of a collective "
            "that another rank has left: their memory stays locked until this process ends"
        )


def _longest_wait_seconds(timeout_seconds: float, ranks: RankGroup) -> float:
    """How long this rank may wait for a worker that makes progress before the other ranks'
    collective would time out.

    Args:
        timeout_seconds: longest wait without progress; it is below the group's timeout.
        ranks: the ranks that wait for this one.
    """
    if ranks.size == 1:
        return math.inf
    return max(timeout_seconds, _SHARE_OF_GROUP_TIMEOUT * ranks.timeout_seconds)
