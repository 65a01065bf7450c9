"""Where the worker runs when nobody has planned it: unbound, on the cores that PyTorch does not reserve."""

from __future__ import annotations

import os

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.offloaded_adam import WorkerSeat

__all__ = ["unplanned_seat"]


def unplanned_seat(settings: ZenFlowConfig, local_ranks: int) -> WorkerSeat:
    """As many threads as this rank's share of the usable cores has left; at least one.

    Args:
        settings: says how many cores PyTorch keeps.
        local_ranks: ranks on this host, which share its cores evenly.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, usable // max(1, local_ranks))
    reserved = settings.pt_reserved_cores
    if reserved is None:
        reserved = settings.pt_reserved_cores_perc
    kept = reserved if isinstance(reserved, int) else round(share * reserved)
    return WorkerSeat(cpus=(), threads=max(1, share - kept))
