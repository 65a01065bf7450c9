"""One rank's worker and what is shared with it: hand-over, every wait, errors that all ranks have together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deepspeed_ext import memory
from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import DeepSpeedExtError, OutOfMemoryError, WorkerError
from deepspeed_ext._logging import logger
from deepspeed_ext._undo import on_failure
from deepspeed_ext._upstream import dist
from deepspeed_ext.zenflow.arena import Arena, ArraySpec, plan_layout
from deepspeed_ext.zenflow.figures import Figures
from deepspeed_ext.zenflow.kernel import library_path
from deepspeed_ext.zenflow.messages import WorkerPlan, WorkerTask
from deepspeed_ext.zenflow.process import OptimizerProcess
from deepspeed_ext.zenflow.seat import WorkerSeat
from deepspeed_ext.zenflow.transfers import Transfers

__all__ = ["WorkerLink"]


class WorkerLink:
    """Makes the arena, starts the worker and talks to it.

    Args:
        specs: the arrays of the arena.
        touch: names of those that take memory from the start; the others do once they are used.
        exchanged: names of those that are copied to or from the accelerator.
        block_size: elements of a block; ends of blocks are where the worker may cut its work.
        seat: where the worker runs.
        ranks: all of them make one of these.
        timeout_seconds: the longest wait for the worker.
        figures: take what is measured here.

    Attributes:
        arena, process, transfers: see there.

    Raises:
        OutOfMemoryError, UnsupportedError: this host cannot hold or share the arena.
        WorkerError: the worker does not start, or another rank has one of these errors.
    """

    arena: Arena
    process: OptimizerProcess

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        touch: Sequence[str],
        exchanged: Sequence[str],
        *,
        block_size: int,
        seat: WorkerSeat,
        ranks: RankGroup,
        timeout_seconds: float,
        figures: Figures,
    ) -> None:
        self.transfers = Transfers()
        self._ranks = ranks
        self._figures = figures
        self._error: DeepSpeedExtError | None = None
        self._gradients_in_flight = 0
        on_failure(self.abandon)
        layout, touched = plan_layout(specs), set(touch)
        place = None if seat.place is None else str(seat.place)
        plan = WorkerPlan(layout, block_size, tuple(touch), place, seat.threads, library_path())
        error = None
        try:
            _require_room(sum(spec.nbytes for spec in specs if spec.name in touched))
            self.arena = Arena.create(layout)
            self.process = OptimizerProcess(self.arena, plan, rank=dist.get_rank(), timeout_seconds=timeout_seconds)
        except DeepSpeedExtError as failure:
            error = failure
        self._require_all(error)
        if self.process.ready.warning:
            logger.warning(f"rank {dist.get_rank()}: the optimizer process {self.process.ready.warning}")
        self.lock(exchanged)

    def lock(self, names: Sequence[str]) -> None:
        """Page-lock these arrays, for copies beside the computation. Idempotent."""
        self.transfers.lock([self.arena.tensor(name) for name in names])

    def send(self, tasks: Sequence[WorkerTask], gradients: int) -> None:
        """Hand `tasks` with that many gradients each to the worker, once what they read has arrived."""
        self.transfers.finish()
        self._gradients_in_flight = gradients
        if self._error is None:
            try:
                self.process.submit(tasks)
            except WorkerError as error:  # told to all ranks together, at the next wait
                self._error = error

    def wait(self) -> DeepSpeedExtError | None:
        """Wait for everything in flight on this rank. Its error is returned: all ranks are to raise it together."""
        if self._error is not None:
            return self._error
        try:
            busy = self.process.busy
            done = self.process.wait()
        except WorkerError as error:
            self._error = error
            return error
        if busy:
            self._figures.note_worker(done.seconds, self._gradients_in_flight)
        return None

    def wait_together(self) -> None:
        """Wait for everything in flight, as a collective.

        Raises:
            WorkerError: on every rank, if the worker of any has failed, or has ended with nothing to do.
        """
        error = self.wait()
        if error is None:
            try:
                self.process.require_alive()
            except WorkerError as ended:
                error = ended
        self._require_all(error)

    def receive(self) -> None:
        """`wait_together` within a step: this rank's own wait counts in the figures."""
        begin = time.perf_counter()
        error = self.wait()
        self._figures.wait_seconds += time.perf_counter() - begin
        self._require_all(error)

    def _require_all(self, error: DeepSpeedExtError | None) -> None:
        """Raise on every rank if any has an error, with the message of the one that has it."""
        if self._ranks.all(error is None):
            return
        messages = self._ranks.gather(None if error is None else str(error))
        self._error = error or WorkerError("; ".join(m for m in messages if m))
        if hasattr(self, "process"):
            self.process.close()
        raise self._error

    def close(self) -> None:
        """End the worker. The arena's tensors stay readable. Idempotent."""
        if hasattr(self, "process"):
            self.process.close()
        self.transfers.unlock()
        if hasattr(self, "arena"):
            self.arena.close()

    def abandon(self) -> None:
        """`close`, and give the memory back whoever still has tensors in it: the constructor of the engine failed."""
        self.close()
        if hasattr(self, "arena"):
            self.arena.discard()


def _require_room(nbytes: int) -> None:
    available = memory.available_host_bytes()
    if nbytes > available:
        raise OutOfMemoryError(
            f"rank {dist.get_rank()}: the optimizer's state takes {nbytes:,} bytes of host memory and "
            f"{available:,} are available: use more ranks, a smaller zenflow.update_interval or more memory"
        )
