"""Decides where gradients wait for their step: on the accelerator, or on the host (``zenflow.gradients_on_host``)."""

from __future__ import annotations

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.worker.sizes import MOST_FOR_GRADIENTS, may_choose_host, prefers_host

__all__ = ["gradients_go_to_host"]


def gradients_go_to_host(run: ZenFlowRun, needed: int, ranks: RankGroup) -> bool:
    """Whether gradients that can go to the host during backward do. A collective, unless the config decides.

    Args:
        run: the settings of this run.
        needed: bytes that gradients take at once if they stay on the accelerator.
        ranks: the data-parallel ranks; all of them call this once the weights are in their places.

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
    chosen = not ranks.all(not prefers_host(needed, free))
    if ranks.rank == 0:
        where = "go to the host during backward" if chosen else "stay on the accelerator until their step"
        logger.info(
            f"zenflow.gradients_on_host = {chosen}: gradients {where}. They would take {needed:,} bytes of the "
            f"accelerator, where {free:,} are free on rank 0, and may take {MOST_FOR_GRADIENTS:.0%} of what is free"
        )
    return chosen
