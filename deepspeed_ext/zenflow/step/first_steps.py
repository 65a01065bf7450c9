"""Measures a run's first steps, chooses from them once how much of the optimizer steps on the
accelerator and with how many threads the host steps the rest, and says what limits a step.

The synchronous steps at the start come first: the passes of some run with several thread counts,
which do not change results. After the first `WATCHED_STEPS` overlapped ones all ranks choose
together (`plan.times`), and the share moves. A run whose steps never overlap chooses behind its
synchronous ones. A resumed run keeps its checkpoint's share. If that was not chosen on this
machine, the run chooses by the same way, from its overlapped steps alone if no other ones are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import agreed, raise_together
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan import times
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, streams_in_step
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.rule import Partition, StepPlan
from deepspeed_ext.zenflow.transfers.landing import landing_buffers
from deepspeed_ext.zenflow.worker.messages import ThreadLimit


class FirstSteps:
    """Observes a run until everything is chosen and said. Every rank of the model has one, or
    none.

    Args:
        chooses_share: whether the share may move; otherwise only threads are chosen.
        counts: thread counts to try, the present one first; a single one stays.
        cores: those of the optimizer process, and all of its rank; None: not known.

    Attributes:
        is_chosen: whether share and threads were chosen on this machine.
        threads: those of the worker's passes.
    """

    def __init__(
        self,
        metrics: Metrics,
        config: ZenFlowConfig,
        chooses_share: bool,
        *,
        counts: Sequence[int],
        cores: tuple[int, int] | None,
    ) -> None:
        self.is_chosen, self.threads = False, counts[0]
        self._metrics, self._counts, self._cores = metrics, tuple(counts), cores
        self._reserve_fraction = config.offload_reserve_fraction
        self._chooses_share = chooses_share
        self._steps = 0  # successive ones that all waited for their own update, or all overlapped
        self._passes: list[float] = []
        self._alone: times.MeasuredStep | None = None  # a typical synchronous step
        self._is_over = False
        metrics.estimating = Stopwatch() if chooses_share else None

    def after_step(self, host: HostOptimizer, plan: StepPlan) -> None:
        """Count a step that has ended; choose if enough have. Then a collective."""
        if self._is_over:
            return
        schedule, waited = host.rule.schedule, plan.waits_last
        self._steps += 1
        if waited and not self.is_chosen:
            with host.link.deferring_errors():
                self._note_alone(host)
        if waited is not schedule.plan().waits_last:  # the coming step is of the other kind
            self._steps = 0
        enough = times.MEASURED_STEPS if waited else times.WATCHED_STEPS
        overlaps_later = waited and host.decided.rule.overlapped
        if self._steps < enough or not schedule.is_settled or overlaps_later:
            return
        if not self.is_chosen and self._choose(host):
            self._steps = 0  # what was measured is the other plan's
            self._metrics.begin_anew()
            return
        self._is_over = True
        with host.link.deferring_errors():
            streams = streams_in_step(host.decided)
            step = self._metrics.typical_step() if streams or not waited else None
            if step is not None and host.ranks.rank == 0:
                logger.info(times.limit_line(step, self._cores, streams=streams))

    def _note_alone(self, host: HostOptimizer) -> None:
        """A synchronous step has ended: note its pass, and set the threads of the next one."""
        if self._steps > times.SETTLING_STEPS:
            self._passes.append(self._metrics.newest.get("worker", math.inf))
            self._alone = self._metrics.typical_step()
        coming = times.probed_threads(self._counts)[len(self._passes) :]
        if coming and host.rule.schedule.plan().waits_last:
            self._limit(host, coming[0])
        else:
            self._limit(host, times.best_threads(self._counts, self._passes))

    def _limit(self, host: HostOptimizer, threads: int) -> None:
        if threads != self.threads:
            with host.link.deferring_errors():
                host.link.process.submit([ThreadLimit(threads)])
            self.threads = threads

    def _choose(self, host: HostOptimizer) -> bool:
        """Choose with all ranks, and return whether the share has moved. A collective."""
        self.is_chosen, self._metrics.estimating = True, None
        if not self._chooses_share:
            return False
        plan, mine = host.decided, (times.ChainTimes(0.0, 0.0), times.UNITS)
        with host.link.deferring_errors():
            reserve = round(memory.total_accelerator_bytes() * self._reserve_fraction)
            beside = self._metrics.typical_step() if plan.rule.overlapped else None
            units = times.least_units(plan, memory.unused_accelerator_bytes() - reserve)
            mine = times.times_of(plan, self._alone, beside), units
        share, why = times.chosen_share(plan, host.ranks.gather_objects(mine))
        moves = share < plan.host_share
        if moves:
            moves = move(host, times.with_host_share(plan, share, why))
            why = why if moves else f"{why}; but a rank could not allocate it"
        if host.ranks.rank == 0:
            ratio = f"offload_optimizer.ratio is {host.decided.host_share:.4g}"
            logger.info(f"{ratio} with {self.threads} core_binding.optimizer_cores: {why}")
        return moves

    def resume(self, host: HostOptimizer, heads: Sequence[int], threads: int | None) -> None:
        """Go on from a checkpoint, after p and the moments were loaded: with its share if there is
        room, and without a choice if it was made on this machine. A collective.

        Args:
            heads: elements of each partition that step on the accelerator. A run whose share has
                moved keeps its own.
            threads: those that were chosen on this machine; None: there was no choice here.
        """
        plan, sizes = host.decided, [each.numel for each in host.decided.partitions]
        fits = len(heads) == len(sizes) and all(
            head % plan.rule.block_size == 0 and head <= size
            for head, size in zip(heads, sizes, strict=False)
        )
        raise_together(host.ranks, None)  # a rank that failed earlier in the load is met here
        mine = int(threads is not None), int(fits), -int(any(heads))
        is_kept, fits_all, wants = map(bool, host.ranks.minimum(*mine))
        if self._chooses_share and (plan.head_bytes or not (wants and fits_all)):
            is_kept &= fits_all and wants is bool(plan.head_bytes)
        elif self._chooses_share:
            share = 1.0 - sum(heads) / max(1, sum(sizes))
            is_kept &= move(host, times.with_heads(plan, heads, share, "the checkpoint's"))
        self._steps, self._passes, self._alone = 0, [], None
        self._metrics.begin_anew()
        if is_kept:
            self.is_chosen, self._metrics.estimating = True, None
        kept = threads if is_kept and threads in self._counts else None
        self._limit(host, kept or self._counts[0])


def move(host: HostOptimizer, plan: ZenFlowPlan) -> bool:
    """Continue with `plan`, in which more elements step on the accelerator, between two steps. A
    collective.

    p and the moments of what moves are copied to the accelerator, and the host's arrays then begin
    after those elements. Later steps equal, to the bit, those of a run that began with this plan
    and the same p and moments. Elements never move back: their host memory may be in use by others.

    Returns:
        False if an accelerator has no memory for it; then nothing has changed.

    Raises:
        WorkerError: on every rank, if any rank's worker has failed.
    """
    link, ranks = host.link, host.ranks
    # the next step publishes y again, without what moves
    host.state.expose(shows_moments=False)
    link.wait_together()
    weights = [state.weights() for state in host.state.wholes]
    with link.deferring_errors():
        link.stream.release()
    heads = Heads.if_all_have_room(plan, weights, link.arena, host.kind, ranks)
    if heads is None:
        with link.deferring_errors():
            link.stream.restore()
        return False
    host.kind.prepare_kernels(plan, weights, warns=ranks.rank == 0)
    with link.deferring_errors():
        heads.take()
    buffers = landing_buffers(plan, ranks)
    if buffers is None:
        told = "smaller landing buffers do not fit where larger ones were"
        raise agreed(OutOfMemoryError(told), ranks)
    with link.deferring_errors():
        link.relay(plan, buffers)
        partitions = [
            Partition.of(plan, index, state, link.arena)
            for index, state in enumerate(host.state.wholes)
        ]
        host.move_to(plan, partitions, heads)
    link.raise_deferred()
    return True
