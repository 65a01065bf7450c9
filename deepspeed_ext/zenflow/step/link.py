"""The trainer's connection to its optimizer process: submit work, wait, and raise errors on all
ranks together."""

from __future__ import annotations

import enum
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.errors import DeepSpeedExtError, StateError, WorkerError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.process import OwnProcess, is_of_handler
from deepspeed_ext.runtime.ranks import DeferredError, RankGroup, raise_together, together
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArrayKey
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.stream import Stream, WeightSlot
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.transfers.beside_step import ChunkSlot, HiddenTransfers, LandingBuffer
from deepspeed_ext.zenflow.transfers.inside_step import Results, Transfers
from deepspeed_ext.zenflow.transfers.page_locks import PageLocks
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.kernel import library_path
from deepspeed_ext.zenflow.worker.messages import (
    ArenaRelay,
    Span,
    ThreadLimit,
    WorkerPlan,
    WorkerTask,
)
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

__all__ = ["UpdatePhase", "WorkerLink", "WorkerThreads"]

_SHARE_OF_GROUP_TIMEOUT = 0.8
"""The rest allows for other ranks that reached the collective earlier."""


class UpdatePhase(enum.Enum):
    """State of the newest update; decides who may read and write p, m and v."""

    READ = "read"
    """The update is in p, m, v, and the rule has read what it needs. The trainer may read p, m and
    v."""
    IN_FLIGHT = "in flight"
    """Handed over and not awaited yet: p, m, v, y and those gradients belong to the worker."""
    ARRIVED = "arrived"
    """The update is in p, m, v and y; the rule has not read the per-block array yet."""
    EXPOSED = "exposed"
    """Like `READ`, but p, m, v may have been written from outside: the next step publishes them
    again."""


@dataclass(frozen=True)
class WorkerThreads:
    """Where and how a worker runs.

    Attributes:
        placement: its cores and memory node; None: inherited.
        count: its threads.
        timeout_seconds: longest time without progress before it counts as failed.
    """

    placement: WorkerPlacement | None
    count: int
    timeout_seconds: float

    def start(self, arena: Arena, plan: ZenFlowPlan) -> OptimizerProcess:
        """Start the worker on this rank's arena, which `plan` describes."""
        placement = None if self.placement is None else str(self.placement)
        chunk = None if plan.chunks is None else plan.chunks.numel
        how = placement, self.count, library_path(), chunk
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
        arena, process, transfers, page_locks, metrics: see their classes.
        phase: state of the newest update.
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
    transfers: Transfers

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
        self.phase = UpdatePhase.READ
        self.write_wait_seconds = 0.0
        self._ranks = ranks
        self.metrics = metrics
        self._kept = DeferredError()
        self._gradients_in_flight = 0
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
        """Build the transfers of `plan`, and lock their memory."""
        self.transfers = self._transfers(plan, buffers)
        parts = self.process, self.transfers, self.page_locks
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
        if not self.transfers.close():
            raise WorkerError(
                "copies between accelerator and host have not ended, so the plan cannot change: "
                "resume from the last checkpoint"
            )
        self._end_copies.detach()
        self.page_locks.unlock()
        layout = self.arena.layout.relaid(plan.arena)
        self.process.wait_for(self.process.submit([ArenaRelay(layout)]))
        self.arena.relay(layout)
        self._carry(plan, buffers)

    def limit_threads(self, threads: int) -> None:
        """Run later passes on the worker's first `threads` threads, with the same results. Does not
        wait.

        Raises:
            WorkerError: the worker has failed.
        """
        self.process.submit([ThreadLimit(threads)])

    def _transfers(self, plan: ZenFlowPlan, buffers: Sequence[LandingBuffer]) -> Transfers:
        results, waiting = _results(self.arena, plan.rule.block_size), self.metrics.waiting
        if plan.streams:
            weights = [
                WeightSlot(self.arena.tensor(*key)) for key in self.arena.keys("y", OF_CHUNKS)
            ]
            return Stream(
                self.process,
                results,
                plan.rule.block_size,
                waiting,
                plan.copies,
                weights,
                self._timeout_seconds,
            )
        if plan.chunks is None:
            return Transfers(self.process, results, plan.rule.block_size, waiting, plan.copies)
        slots, how = _slots_of_chunks(self.arena), (plan.chunks, self._timeout_seconds, waiting)
        return HiddenTransfers(self.process, results, buffers, *how, slots)

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
        return self._kept.deferring_errors(_told)

    @property
    def failed(self) -> bool:
        """Whether this rank has kept an error, which the next wait raises on every rank."""
        return self._kept.error is not None

    def depart(
        self,
        tasks: Sequence[WorkerTask],
        *,
        gradients: int,
        publishes: bool,
        gives: Iterable[int] = (),
    ) -> None:
        """Send the gradients that `transfers` has taken, and hand over work on them and earlier
        ones. Does nothing if this rank has failed.

        Args:
            tasks: at most one task per partition.
            gradients: number of gradients per task.
            publishes: whether the worker's results are read before the next gradients are taken.
            gives: partitions whose weights the worker gives.
        """
        self.transfers.expect(gives)
        if self.failed:
            return
        with self.deferring_errors():
            if tasks:
                self._gradients_in_flight, self.phase = gradients, UpdatePhase.IN_FLIGHT
            self.transfers.depart(tasks, publishes)

    def follow(self) -> None:
        """Send the passes of what the worker has peeked at. Does nothing if this rank has failed,
        or has sent them."""
        if not self.failed:
            with self.deferring_errors():
                self.transfers.follow()

    def free(self, index: int, span: Span) -> None:
        """Wait, on this rank alone, until the worker has read the gradient of these elements of a
        partition, so that the next one may take its place."""
        self.home.require()
        if not self.failed:
            with self.deferring_errors(), self.metrics.waiting.measured():
                self.transfers.free(index, span, Patience(self.longest_wait_seconds))
        self._lose_if_failed([(index, span)])

    def start_copies(self) -> None:
        """Start the copies of the gradients that `transfers` has taken (see `Transfers.start`).
        Does nothing if this rank has failed."""
        if not self.failed:
            with self.deferring_errors():
                self.transfers.start()

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
                self.metrics.bytes_up += self.transfers.complete(within)
                seconds = self.transfers.wait(within)
                if self.phase is UpdatePhase.IN_FLIGHT:
                    self.phase = UpdatePhase.ARRIVED
                    self.metrics.note_worker(seconds, self._gradients_in_flight)
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
        if not self.transfers.are_due:
            return
        self.home.require()
        used = None if parts is None else list(parts)
        if not self.failed:
            with self.deferring_errors(), self.metrics.waiting.measured():
                within = Patience(self.longest_wait_seconds)
                self.metrics.bytes_up += self.transfers.complete(within, used)
        self._lose_if_failed(used)

    def _lose_if_failed(self, parts: Sequence[tuple[int, Span]] | None = None) -> None:
        if self.failed:
            with self.deferring_errors():
                self.transfers.lose(parts)

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

    def receive(self, *, passes: bool = True) -> None:
        """Like `wait_together`, inside a step: adds this rank's own wait to the metrics, and does
        not check an idle worker.

        Args:
            passes: whether to wait for everything; otherwise for this step's weights alone.
        """
        with self.deferring_errors(), self.metrics.waiting.measured():
            if passes:
                self.wait()
            elif not self.failed:
                within = Patience(self.longest_wait_seconds)
                self.metrics.bytes_up += self.transfers.complete(within)
        self._lose_if_failed()
        self.raise_deferred()

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
    process: OptimizerProcess, transfers: Transfers, page_locks: PageLocks, owner_pid: int
) -> None:
    """Unlock memory once no copy is running; if a copy does not end, leave everything that it
    uses."""
    if os.getpid() != owner_pid:  # a forked process must not use the accelerator
        return
    process.close()
    if transfers.close():
        page_locks.unlock()
    else:
        page_locks.leave(transfers)
        logger.warning(
            "copies between accelerator and host have not ended, perhaps because of a collective "
            "that another rank has left: their memory stays locked until this process ends"
        )


def _results(arena: Arena, block_size: int) -> list[list[Results]]:
    """The arrays that the worker writes for the trainer, by partition and slot of its ring."""
    keys = [array.spec.key for array in arena.layout.arrays]
    means = {
        key.partition: _by_block(arena, key, block_size)
        for key in keys
        if key.kind in ("block_means", "known")
    }
    found: dict[int, list[Results]] = {key.partition: [] for key in keys if key.kind == "p"}
    for _, partition, slot in (key for key in keys if key.kind == "g"):
        if partition == OF_CHUNKS:
            continue
        results = Results(arena.tensor("y", partition, slot), means.get(partition))
        found[partition].append(results)
    for partition, each in found.items():
        if not each:  # y passes through chunk slots
            numel, dtype = arena.tensor("p", partition).numel(), arena.tensor("y", OF_CHUNKS).dtype
            each.append(
                Results(torch.empty(numel, dtype=dtype, device="meta"), means.get(partition))
            )
    return list(found.values())


def _slots_of_chunks(arena: Arena) -> list[ChunkSlot]:
    """The slots that chunks pass through; empty: partitions keep whole gradients."""
    return [
        ChunkSlot(
            arena.tensor(*key), arena.tensor("y", OF_CHUNKS, key.slot), streams.blocking_event()
        )
        for key in arena.keys("g", OF_CHUNKS)
    ]


def _by_block(arena: Arena, key: ArrayKey, block_size: int) -> torch.Tensor:
    """A per-block array, with one row per block if a block has several elements."""
    array = arena.tensor(*key)
    blocks = -(-arena.tensor("p", key.partition).numel() // block_size)
    return array if array.numel() == blocks else array.view(blocks, -1)


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
