"""Decides where gradients wait for their step: on the accelerator, or on the host (``zenflow.gradients_on_host``)."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.zenflow.step.link import host_shortage
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.worker.sizes import MOST_FOR_GRADIENTS, may_choose_host, prefers_host

__all__ = ["GradientBytes", "gradients_go_to_host"]


@dataclass(frozen=True)
class GradientBytes:
    """What a rank's gradients take, in one of two places.

    Attributes:
        accelerator: at once, if they stay on the accelerator until their step.
        sums: on the host, for sums of micro-steps in another dtype than that of the ring, if they go there.
        buckets: on the accelerator, for gradients that are being reduced, wherever they go then.
        may_leave: whether they can go to the host during backward.
    """

    accelerator: int
    sums: int
    buckets: int = 0
    may_leave: bool = True


def gradients_go_to_host(run: ZenFlowRun, needed: int, host_needed: int, ranks: RankGroup) -> bool:
    """Whether gradients that can go to the host during backward do. A collective, unless the config decides.

    Args:
        needed: bytes that gradients take at once if they stay on the accelerator.
        host_needed: bytes of this rank on the host, with gradients there.
        ranks: the ranks that the model is spread over; all of them call this once the weights are in their places.

    Returns:
        The same on every rank.
    """
    config, wanted = run.config, run.config.gradients_on_host
    if get_accelerator().is_synchronized_device() or wanted is False:
        return False
    if wanted is None and not may_choose_host(config.hide_transfers, run.host_share):
        return False
    if wanted:
        return True
    with together(ranks):
        free = allocation.free_accelerator_bytes()
    is_tight = not ranks.all(not prefers_host(needed, free))
    chosen = is_tight and ranks.all(host_shortage(host_needed, ranks) is None)
    if ranks.rank == 0:
        _log(chosen, is_tight, needed, free)
    return chosen


def _log(chosen: bool, is_tight: bool, needed: int, free: int) -> None:
    """Say where gradients go, and why."""
    where = "go to the host during backward" if chosen else "stay on the accelerator until their step"
    short = "; but a host has no memory for them" if is_tight and not chosen else ""
    logger.debug(
        f"zenflow.gradients_on_host = {chosen}: gradients {where}. They would take {needed:,} bytes of the "
        f"accelerator, where {free:,} are free on rank 0, and should take at most {MOST_FOR_GRADIENTS:.0%} of what is "
        f"free on any rank{short}"
    )
