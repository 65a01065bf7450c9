"""How the ranks of a job come to one core plan for each host.

Each rank sends what it knows; ranks with the same boot id are on one host, whatever their host names (containers on
one host share its CPU numbers). Every rank then computes its host's plan, and the plans' hashes are compared. A rank
that cannot read its host or does not want to be bound still takes part: nobody waits for a message that never comes.
"""

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed_ext._errors import ConfigError, PlanMismatchError, RankError, UnsupportedError
from deepspeed_ext.affinity.allowed import find_allowed
from deepspeed_ext.affinity.plan import HostPlan, PlanRequest, RankFacts, RankPlan, plan_host
from deepspeed_ext.affinity.topology import Topology, flat_topology, read_accelerator_node, read_topology
from deepspeed_ext.affinity.tuning_results import DEFAULT_KERNEL, Fingerprint
from deepspeed_ext.host.cgroup import read_cgroup_id, read_cpu_quota_cores
from deepspeed_ext.host.procfs import read_text

__all__ = ["Agreement", "Gather", "RankReport", "agree", "group_gather", "report_rank"]

Gather = Callable[[Any], Sequence[Any]]
"""Takes one object of this rank and returns those of all ranks, in rank order."""


@dataclass(frozen=True)
class RankReport:
    """What one rank tells the others."""

    rank: int
    boot_id: str
    facts: RankFacts
    topology_digest: str | None
    """None where this rank cannot read its host."""
    request: PlanRequest
    kernel: str = DEFAULT_KERNEL
    tuned: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    disabled: str | None = None
    """Why this rank does not want to be bound."""
    error: str | None = None
    """A contradiction in this rank's configuration."""
    failure: str | None = None
    """What else went wrong on this rank before it could report."""

    @classmethod
    def of_failure(cls, rank: int, local_rank: int, error: Exception) -> "RankReport":
        """The report of a rank that could not make one: its error, for all ranks."""
        report = cls(rank, "", RankFacts(local_rank, frozenset()), None, PlanRequest())
        is_contradiction = isinstance(error, ConfigError)
        return replace(report, error=str(error)) if is_contradiction else replace(report, failure=_described(error))


@dataclass(frozen=True)
class Agreement:
    """What the ranks of this host agreed on."""

    mine: RankPlan | None
    """None: this rank stays unbound."""
    host: HostPlan | None
    topology: Topology
    warnings: tuple[str, ...] = ()
    leads_host: bool = True
    """Whether this rank speaks for its host in the log."""


def group_gather(group: Any = None) -> Gather:
    """`Gather` over a torch.distributed process group; of this process alone where nothing is initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return lambda item: [item]

    def gather(item: Any) -> Sequence[Any]:
        items: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(items, item, group=group)
        return items

    return gather


def report_rank(
    rank: int,
    local_rank: int,
    request: PlanRequest,
    *,
    pci_address: str | None = None,
    kernel: str = DEFAULT_KERNEL,
    tuned: Mapping[str, int] | None = None,
    disabled: str | None = None,
    root: Path | str = "/",
) -> tuple[RankReport, Topology | None]:
    """Read this rank's host. A host that cannot be read, and a contradiction, are part of the report."""
    topology, node, quota, error = None, None, None, None
    warnings: tuple[str, ...] = ()
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    try:
        topology = read_topology(root)
        found = find_allowed(topology, root)
        allowed, warnings = found.cpus, found.warnings
        node = read_accelerator_node(topology, pci_address, root) if pci_address else None
        quota = read_cpu_quota_cores(root)
    except (UnsupportedError, OSError) as unreadable:
        topology, warnings = None, (str(unreadable),)
    except ConfigError as contradiction:
        error = str(contradiction)
    report = RankReport(
        rank=rank,
        boot_id=read_text(Path(root, "proc/sys/kernel/random/boot_id")) or socket.gethostname(),
        facts=RankFacts(local_rank, allowed, node, quota, read_cgroup_id(root)),
        topology_digest=topology.digest() if topology else None,
        request=request,
        kernel=kernel,
        tuned=tuned or {},
        warnings=warnings,
        disabled=disabled or (None if allowed else "this platform has no affinity interface"),
        error=error,
    )
    return report, topology


def agree(mine: RankReport, topology: Topology | None, gather: Gather) -> Agreement:
    """Exchange reports, plan this host, and compare the plans. A collective: every rank of the gather calls it.

    Raises:
        ConfigError: on every rank, if a rank's configuration contradicts itself.
        PlanMismatchError: on every rank, if ranks asked for different things or computed different plans.
        RankError: on every rank, if anything else went wrong on one.
    """
    reports: Sequence[RankReport] = gather(mine)
    if errors := [f"rank {report.rank}: {report.error}" for report in reports if report.error]:
        raise ConfigError("; ".join(errors))
    _raise_failures((report.rank, report.failure) for report in reports)
    if len({report.request for report in reports}) > 1:
        listing = "; ".join(f"rank {report.rank}: {report.request}" for report in reports)
        raise PlanMismatchError(f"the ranks ask for different core plans, give all the same config: {listing}")
    peers = sorted(
        (report for report in reports if report.boot_id == mine.boot_id),
        key=lambda report: (report.facts.local_rank, report.rank),
    )
    agreement, digest, failure = None, "", None
    try:
        agreement = _plan_with(mine, topology, peers)
        # A host whose ranks each plan for themselves has nothing to compare.
        if agreement.host is not None and len(agreement.host.ranks) == len(peers):
            digest = agreement.host.digest()
    except Exception as error:  # the ranks of other hosts are on their way to the next gather
        failure = error
    plans = gather((mine.rank, mine.boot_id, digest, failure and _described(failure)))
    _raise_failures((rank, text) for rank, _, _, text in plans)
    _require_equal([plan[:3] for plan in plans])
    assert agreement is not None
    return agreement


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _raise_failures(failures: Iterable[tuple[int, str | None]]) -> None:
    if texts := [f"rank {rank}: {text}" for rank, text in failures if text]:
        raise RankError(f"core binding: {'; '.join(texts)}")


def _plan_with(mine: RankReport, topology: Topology | None, peers: Sequence[RankReport]) -> Agreement:
    position = next(index for index, peer in enumerate(peers) if peer.rank == mine.rank)
    known = topology or flat_topology(mine.facts.allowed)
    unbound = Agreement(None, None, known, mine.warnings, leads_host=position == 0)
    if disabled := [f"rank {peer.rank}: {peer.disabled}" for peer in peers if peer.disabled]:
        return replace(unbound, warnings=(*mine.warnings, f"no core binding on this host ({'; '.join(disabled)})"))
    if len({peer.topology_digest for peer in peers}) == 1 and topology is not None:
        # Ranks started by hand or in several containers may repeat a local rank: the position never does.
        facts = [replace(peer.facts, local_rank=index) for index, peer in enumerate(peers)]
        request = _with_tuning(topology, facts, peers[0])
        host = plan_host(topology, facts, request)
        return replace(unbound, mine=host.ranks[position], host=host, warnings=(*mine.warnings, *host.warnings))
    masks = [peer.facts.allowed for peer in peers]
    if sum(len(mask) for mask in masks) > len(frozenset().union(*masks)):
        text = (
            "ranks of this host see different CPUs (containers, or no sysfs) and their masks overlap: no core binding"
        )
        return replace(unbound, warnings=(*mine.warnings, text))
    alone = plan_host(known, [replace(mine.facts, local_rank=position)], mine.request)
    text = "ranks of this host see different CPUs (containers, or no sysfs): each plans inside its own mask"
    return replace(unbound, mine=alone.ranks[0], host=alone, warnings=(*mine.warnings, text, *alone.warnings))


def _with_tuning(topology: Topology, facts: Sequence[RankFacts], leader: RankReport) -> PlanRequest:
    """The request, completed by the leader's measurement of exactly this situation where nothing else was asked."""
    request = leader.request
    if request.pt_reserved_cores is not None or request.optimizer_cores is not None or not request.separate:
        return request
    return replace(request, optimizer_cores=leader.tuned.get(Fingerprint.of(topology, facts, leader.kernel).key))


def _require_equal(plans: Sequence[tuple[int, str, str]]) -> None:
    by_host: dict[str, dict[str, list[int]]] = {}
    for rank, boot_id, digest in plans:
        by_host.setdefault(boot_id, {}).setdefault(digest, []).append(rank)
    for digests in by_host.values():
        if len(digests) > 1:
            listing = "; ".join(f"ranks {ranks}: {digest or 'none'}" for digest, ranks in digests.items())
            raise PlanMismatchError(f"ranks of one host computed different core plans ({listing}): versions differ?")
