"""Where the worker runs: where the core plan says, or unbound on the cores that PyTorch does not reserve."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deepspeed_ext.affinity.worker import WorkerPlace
from deepspeed_ext.config import ZenFlowConfig

__all__ = ["WorkerSeat", "planned_seat", "reserved_cores", "unplanned_seat"]


@dataclass(frozen=True)
class WorkerSeat:
    """Where the worker runs: its place (None: as inherited) and its number of threads."""

    place: WorkerPlace | None
    threads: int


def reserved_cores(settings: ZenFlowConfig) -> int | float | None:
    """What the user reserves for PyTorch, under our name or DeepSpeed's; None if nothing was said."""
    if settings.pt_reserved_cores is not None:
        return settings.pt_reserved_cores
    fraction = settings.pt_reserved_cores_perc
    return fraction if "pt_reserved_cores_perc" in settings.model_fields_set and 0.0 < fraction < 1.0 else None


def planned_seat(place: WorkerPlace) -> WorkerSeat:
    """One thread on each CPU of the plan."""
    return WorkerSeat(place, max(1, len(place.cpus)))


def unplanned_seat(settings: ZenFlowConfig, local_ranks: int) -> WorkerSeat:
    """As many threads as this rank's share of the usable cores has left; at least one.

    Args:
        settings: says how many cores PyTorch keeps.
        local_ranks: ranks on this host, which share its cores evenly.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, usable // max(1, local_ranks))
    reserved = reserved_cores(settings) or 0.5
    kept = reserved if isinstance(reserved, int) else round(share * reserved)
    return WorkerSeat(None, max(1, share - kept))
