"""Moves a share of the optimizer to the accelerator, once, between two synchronous steps.

Measured steps say how much the host can step while the accelerator runs forward and backward
(`plan.share`). The rest moves without rounding: p and the moments are copied to the accelerator,
and the host's arrays begin behind them. Later steps are those of a run that had this share from
the start, and the same p and moments at this step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import agreed
from deepspeed_ext.zenflow.built_parts import landing_buffers, partition_of, prepare_kernels
from deepspeed_ext.zenflow.plan.lanes import traffic_of
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.search import Measured, search_measured
from deepspeed_ext.zenflow.plan.share import (
    MEASURED_STEPS,
    UNITS,
    ChainTimes,
    is_worth_it,
    with_copies_inside,
    with_heads,
    with_host_share,
)
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.link import UpdatePhase
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.schedule import StepPlan

__all__ = ["ShareChoice", "move_share"]


class ShareChoice:
    """Chooses the share once enough synchronous steps in a row have been measured. All ranks of the
    model choose the same.

    Args:
        reserve_fraction: of the accelerator's memory, which stays free beside the most that a step
            has taken (``zenflow.offload_reserve_fraction``).
        may_expose: whether landing buffers may give way to a larger share; False if the config asks
            for them.
    """

    def __init__(self, metrics: Metrics, reserve_fraction: float, *, may_expose: bool) -> None:
        self._metrics = metrics
        self._may_expose = may_expose
        self._reserve_fraction = reserve_fraction
        self._measured = 0
        self._is_open = True

    def after_step(self, host: HostOptimizer, plan: StepPlan) -> None:
        """Count a step that has ended, and choose after the last that is measured."""
        is_between = plan.waits_last and host.rule.schedule.plan().waits_last
        if self._is_open and self._measured and not is_between and host.ranks.rank == 0:
            logger.info(
                f'offload_optimizer.ratio = "auto" stays {host.decided.host_share:.4g}: only '
                f"{self._measured} of {MEASURED_STEPS} synchronous steps were left to measure"
            )
        self._measured = self._measured + 1 if is_between else 0
        if not self._is_open or self._measured < MEASURED_STEPS:
            return
        self._is_open = False
        self._choose(host)

    def adopt(self, host: HostOptimizer, heads: Sequence[int]) -> None:
        """See `Mover.adopt`. If it cannot, the choice stays open."""
        sizes = [state.master.numel() for state in host.states]
        blocks = host.rule.block_size
        fits = len(heads) == len(sizes) and all(
            head % blocks == 0 and head <= size for head, size in zip(heads, sizes, strict=False)
        )
        wants = self._is_open and fits and any(heads)
        wanted, fits_all = host.ranks.minimum(-int(wants), int(fits))
        if not (wanted and fits_all):
            return
        share = 1.0 - sum(heads) / max(1, sum(sizes))
        plan = with_heads(host.decided, heads, share, "the checkpoint's")
        moved = _move(host, plan, hides=False)
        if not moved and self._may_expose and plan.copies is Copies.BESIDE_STEP:
            moved = _move(host, with_copies_inside(plan), hides=False)
        self._is_open = not moved

    def _choose(self, host: HostOptimizer) -> None:
        now = host.decided
        mine = Measured.of(now, self._may_expose, ChainTimes(0.0, 0.0), 0)
        with host.link.keeping():
            reserve = round(memory.total_accelerator_bytes() * self._reserve_fraction)
            room = memory.unused_accelerator_bytes() - reserve
            mine = Measured.of(now, self._may_expose, self._times(now), room)
        of_all = host.ranks.gather_objects(mine)
        found = search_measured(now, self._may_expose, of_all)
        slowest = max((each.times for each in of_all), key=lambda times: times.worker)
        least = max(each.least[0] for each in of_all) / UNITS
        why = (
            f"a pass over all elements takes {slowest.worker * 1e3:.1f} ms, copies "
            f"{slowest.link * 1e3:.1f} ms, the accelerator {slowest.device * 1e3:.1f} ms between "
            f"two steps, and every rank has room for {1.0 - least:.1%} of its optimizer"
        )
        share = now.host_share
        if is_worth_it(now, found.share):
            if move_share(host, found.plan, found.share, why):
                share = found.share
            else:
                why = f"{why}; but a rank could not allocate it"
        if host.ranks.rank == 0:
            logger.info(f'offload_optimizer.ratio = "auto" is {share:.4g}: {why}')
            if host.decided.copies is not now.copies:
                logger.info(str(host.decided.reasons[-2]))

    def _times(self, plan: ZenFlowPlan) -> ChainTimes:
        worker, device = self._metrics.typical()
        waited = self._metrics.wait_seconds
        chunks, size = 0, plan.chunks
        if size is not None:
            chunks = sum(-(-each.on_host // size.numel) for each in plan.partitions)
        # a synchronous step waits for all copies, an overlapped one for those of one chunk
        fixed = max(0.0, waited - worker) / chunks if chunks and math.isfinite(waited) else 0.0
        moves, both = traffic_of(plan), self._metrics.link_seconds
        slower = max(moves.down, moves.up) / (moves.down + moves.up)
        return ChainTimes(device, worker, slower * both if math.isfinite(both) else 0.0, fixed)


def move_share(host: HostOptimizer, plan: ZenFlowPlan, host_share: float, why: str) -> bool:
    """Step all but `host_share` of each partition on the accelerator from now on. A collective
    between two synchronous steps.

    Args:
        plan: the run's, or the same without landing buffers.

    Returns:
        False if an accelerator has no memory for it; then nothing has changed.
    """
    hides = host.link.phase is not UpdatePhase.EXPOSED
    return _move(host, with_host_share(plan, host_share, why), hides=hides)


def _move(host: HostOptimizer, plan: ZenFlowPlan, *, hides: bool) -> bool:
    """Go on with `plan`.

    Args:
        hides: whether to free the host memory of what has moved; False if p and the moments may
            have been written from outside, so that the next step takes them from there once more.

    Returns:
        False if an accelerator has no memory for it; then nothing has changed.

    Raises:
        WorkerError: on every rank, if any rank's worker has failed.
    """
    link, ranks = host.link, host.ranks
    link.wait_together()
    weights = [state.weights() for state in host.states]
    with link.keeping():
        link.transfers.release()
    share = AcceleratorShare.if_all_have_room(plan, weights, link.arena, host.kind, ranks)
    if share is None:
        with link.keeping():
            link.transfers.restore()
        return False
    prepare_kernels(plan, host.kind, weights, warns=ranks.rank == 0)
    with link.keeping():
        share.take()
    buffers = landing_buffers(plan, ranks)
    if buffers is None:
        told = "smaller landing buffers do not fit where larger ones were"
        raise agreed(OutOfMemoryError(told), ranks)
    with link.keeping():
        link.relay(plan, buffers)
        partitions = [
            partition_of(plan, before.index, state, before.ranks, link.arena)
            for before, state in zip(host.partitions, host.states, strict=True)
        ]
        host.move_to(plan, partitions, share)
        if hides:  # what is freed was copied by blocking copies
            share.hide()
    link.raise_kept()
    return True
