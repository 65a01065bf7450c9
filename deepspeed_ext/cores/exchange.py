"""Lets the ranks of a job agree on one core plan per host.

Each rank reports what it knows about its host to the other ranks of that host. Ranks with the same
boot id are on one host, even if host names differ: containers on one host share its CPU numbers.
Every rank then computes its host's plan, and the hashes of the plans are compared. A rank that
cannot read its host, or must not be bound, still takes part in every collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepspeed_ext.cores import initial_mask
from deepspeed_ext.cores.plan import HostPlan, PlanRequest, RankFacts, RankPlan, plan_host
from deepspeed_ext.cores.topology import (
    Topology,
    find_allowed,
    flat_topology,
    read_accelerator_node,
    read_topology,
)
from deepspeed_ext.errors import PlanMismatchError, UnsupportedError
from deepspeed_ext.runtime.cgroup import CpuQuota, read_cpu_quotas
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist
from deepspeed_ext.runtime.procfs import host_id
from deepspeed_ext.runtime.ranks import RankGroup, rank_list, require_same_plan, together

__all__ = ["Agreement", "RankReport", "agree", "report_rank"]


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others. Small, because ranks of all hosts receive it."""

    rank: int
    boot_id: str
    """Identifies the running kernel, hence the host."""
    local_rank: int
    allowed: str
    """List of the CPUs that this rank may use."""
    topology_digest: str | None
    """None if this rank cannot read its host."""
    request: PlanRequest
    accelerator_node: int | None = None
    quotas: tuple[CpuQuota, ...] = ()
    warnings: tuple[str, ...] = ()
    disabled: str | None = None
    """Why this rank must not be bound; None if it may be."""

    def facts(self, local_rank: int) -> RankFacts:
        """This rank's facts for the planner, under the given local rank."""
        return RankFacts(
            local_rank, parse_cpulist(self.allowed), self.accelerator_node, self.quotas
        )


@dataclass(frozen=True)
class Agreement:
    """The result of `agree` on one rank."""

    mine: RankPlan | None
    """None if this rank stays unbound."""
    host: HostPlan | None
    """Plan of this rank's host; None if the host stays unbound."""
    topology: Topology
    warnings: tuple[str, ...] = ()
    leads_host: bool = True
    """Whether this rank logs for its host."""
    request: PlanRequest = field(default_factory=PlanRequest)
    """What the plan was asked for."""


def report_rank(
    rank: int,
    local_rank: int,
    request: PlanRequest,
    *,
    pci_address: str | None = None,
    disabled: str | None = None,
    root: Path | str = "/",
) -> tuple[RankReport, Topology | None]:
    """Read this rank's host and return the report and the topology.

    If the host cannot be read, the topology is None and a warning in the report says why. If this
    rank must not be bound, the host is not read.

    Args:
        rank, local_rank, request, disabled: see `RankReport`.
        pci_address: PCI address of the rank's accelerator; None if unknown.
        root: directory that holds ``sys`` and ``proc``.

    Raises:
        ConfigError: the settings contradict each other or the host.
    """
    topology, node = None, None
    quotas: tuple[CpuQuota, ...] = ()
    warnings: tuple[str, ...] = ()
    allowed = initial_mask.initial() or initial_mask.present()
    try:
        if disabled is None:
            topology = read_topology(root)
            found = find_allowed(topology, root)
            allowed, warnings = found.cpus, found.warnings
            node = read_accelerator_node(topology, pci_address, root) if pci_address else None
            quotas = read_cpu_quotas(root)
    except (UnsupportedError, OSError) as unreadable:
        topology, warnings = None, (str(unreadable),)
    report = RankReport(
        rank=rank,
        boot_id=host_id(root),
        local_rank=local_rank,
        allowed=format_cpulist(allowed),
        topology_digest=topology.digest() if topology else None,
        request=request,
        accelerator_node=node,
        quotas=quotas,
        warnings=warnings,
        disabled=disabled or (None if allowed else "this platform has no affinity interface"),
    )
    return report, topology


def agree(mine: RankReport, topology: Topology | None, ranks: RankGroup) -> Agreement:
    """Exchange reports, plan this host, and compare the plans. A collective: every rank of `ranks`
    calls it.

    Args:
        topology: this rank's host; None if it cannot be read.

    Raises:
        PlanMismatchError: on every rank, if ranks asked for different things or computed different
            plans.
        RankError: on every rank, if a host cannot be planned.
    """
    require_same_plan("core binding", mine.request, ranks)
    found = ranks.gather_among(mine.boot_id, replace(mine, warnings=())).values()
    with together(ranks):
        peers = sorted(found, key=lambda report: (report.local_rank, report.rank))
        agreement = _plan_with(mine, topology, peers)
        # If each rank planned only for itself, there is nothing to compare.
        is_joint = agreement.host is not None and len(agreement.host.ranks) + len(
            agreement.host.unbound
        ) == len(peers)
        digest = agreement.host.digest() if agreement.host is not None and is_joint else ""
    _require_same_host_plan(mine.boot_id, digest, ranks)
    return agreement


def _plan_with(
    mine: RankReport, topology: Topology | None, peers: Sequence[RankReport]
) -> Agreement:
    """Plan this rank's host from the reports of all its ranks, in local-rank order."""
    position = next(index for index, peer in enumerate(peers) if peer.rank == mine.rank)
    # Local ranks may repeat (ranks started by hand, several containers); positions do not.
    facts = [peer.facts(index) for index, peer in enumerate(peers)]
    known = topology or flat_topology(facts[position].allowed)
    leads_host = position == 0
    unbound = Agreement(None, None, known, mine.warnings, leads_host, mine.request)
    if disabled := [f"rank {peer.rank}: {peer.disabled}" for peer in peers if peer.disabled]:
        return replace(
            unbound,
            warnings=(*mine.warnings, f"no core binding on this host ({'; '.join(disabled)})"),
        )
    if len({peer.topology_digest for peer in peers}) == 1 and topology is not None:
        host = plan_host(topology, facts, mine.request)
        plan = next((rank for rank in host.ranks if rank.local_rank == position), None)
        return replace(unbound, mine=plan, host=host, warnings=(*mine.warnings, *host.warnings))
    differ = "the ranks of this host see different CPUs (separate containers, or no sysfs)"
    masks = [rank.allowed for rank in facts]
    if sum(len(mask) for mask in masks) > len(frozenset().union(*masks)):
        text = f"{differ} and their masks overlap: no core binding on this host"
        return replace(unbound, warnings=(*mine.warnings, text))
    alone = plan_host(known, [facts[position]], mine.request)
    text = f"{differ}: each rank plans inside its own mask"
    return replace(
        unbound, mine=alone.ranks[0], host=alone, warnings=(*mine.warnings, text, *alone.warnings)
    )


def _require_same_host_plan(boot_id: str, digest: str, ranks: RankGroup) -> None:
    """Compare the plans' digests among the ranks of each host; raise on every rank if they differ
    on any host."""
    holders: dict[str, list[int]] = {}
    for rank, plan in ranks.gather_among(boot_id, digest).items():
        holders.setdefault(plan, []).append(rank)
    with together(ranks):
        if len(holders) > 1:
            listing = "; ".join(
                f"{rank_list(members, ranks)}: {plan or 'none'}"
                for plan, members in holders.items()
            )
            raise PlanMismatchError(
                f"ranks of one host computed different core plans ({listing}). "
                "Install the same version of deepspeed_ext for all of them"
            )
