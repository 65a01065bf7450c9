"""Where the worker runs: at its place in the core plan, or unbound with as many threads as the plan would give it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deepspeed_ext._errors import ConfigError, UnsupportedError
from deepspeed_ext.affinity.allowed import find_allowed
from deepspeed_ext.affinity.fair_shares import usable_cores
from deepspeed_ext.affinity.topology import read_topology
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.host.cgroup import read_cpu_quota_cores
from deepspeed_ext.host.core_split import split_cores, within_quota

__all__ = ["WorkerSeat", "planned_seat", "reserved_cores", "unplanned_seat"]


@dataclass(frozen=True)
class WorkerSeat:
    """Where the worker runs: its place (None: as inherited) and its number of threads."""

    place: WorkerPlacement | None
    threads: int


def reserved_cores(settings: ZenFlowConfig) -> int | float | None:
    """What the user reserves for PyTorch, under our name or DeepSpeed's; None if nothing was said."""
    if settings.pt_reserved_cores is not None:
        return settings.pt_reserved_cores
    fraction = settings.pt_reserved_cores_perc
    return fraction if "pt_reserved_cores_perc" in settings.model_fields_set and 0.0 < fraction < 1.0 else None


def planned_seat(place: WorkerPlacement) -> WorkerSeat:
    """One thread on each CPU of the plan."""
    return WorkerSeat(place, max(1, len(place.cpus)))


def unplanned_seat(settings: ZenFlowConfig, local_ranks: int) -> WorkerSeat:
    """As many threads as a plan would give the optimizer out of this rank's share of the usable cores; at least one.

    Args:
        settings: says how many cores PyTorch keeps.
        local_ranks: ranks on this host, which share its cores evenly.
    """
    sharers = max(1, local_ranks)
    share = within_quota(max(1, _count_cores() // sharers), read_cpu_quota_cores(), sharers)
    _, optimizer = split_cores(share, reserved_cores(settings))
    return WorkerSeat(None, optimizer)


def _count_cores() -> int:
    """Physical cores that this process may use, as a plan counts them; CPUs if the host does not describe its cores."""
    try:
        topology = read_topology()
        return len(usable_cores(topology, find_allowed(topology).cpus))
    except (ConfigError, UnsupportedError):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
