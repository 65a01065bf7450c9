"""The core plan of one host: which CPUs PyTorch and the optimizer of each rank get. A pure function of plain facts."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from deepspeed_ext.affinity.fair_shares import Pool, home_node, share_cores, usable_cores
from deepspeed_ext.affinity.placement import Need, Placement, place
from deepspeed_ext.affinity.topology import Core, Topology
from deepspeed_ext.host.core_split import check_reserved_cores, split_cores, within_quota
from deepspeed_ext.host.cpulist import format_cpulist

__all__ = ["HostPlan", "PlanRequest", "RankFacts", "RankPlan", "plan_host"]


@dataclass(frozen=True)
class RankFacts:
    """What the planner knows about one rank of the host."""

    local_rank: int
    allowed: frozenset[int]
    """CPUs that the user or scheduler gave; the plan stays within."""
    accelerator_node: int | None = None
    """NUMA node next to the rank's accelerator; None unknown."""
    quota_cores: float | None = None
    """CPU time its control group may use, in cores; None unlimited."""
    cgroup: str = ""
    """Ranks with the same text share one quota."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user, or the tuner, asks of the planner.

    Raises:
        ValueError: a value out of its range.
    """

    pt_reserved_cores: int | float | None = None
    """Cores of a rank kept for PyTorch: a count, a fraction, or None for what the optimizer leaves, else half."""
    optimizer_cores: int | None = None
    """Cores of a rank for its optimizer process; None: what PyTorch leaves."""
    separate: bool = True
    """False where the optimizer runs in the trainer's own process: each rank keeps its whole share in one piece."""

    def __post_init__(self) -> None:
        if self.pt_reserved_cores is not None:
            check_reserved_cores(self.pt_reserved_cores)
        if self.optimizer_cores is not None and self.optimizer_cores < 1:
            raise ValueError(f"the optimizer needs at least 1 core, got {self.optimizer_cores}")


@dataclass(frozen=True)
class RankPlan:
    """The CPUs of one rank."""

    local_rank: int
    pytorch: tuple[int, ...]
    """Mask of the trainer's threads: all allowed hardware threads of its cores."""
    optimizer: tuple[int, ...]
    """Mask of the optimizer process: one hardware thread a core; empty where it is not a process of its own."""
    pytorch_threads: int
    """Number of training cores, hence of OpenMP threads."""
    numa_node: int
    """Home node: next to the accelerator where that is known; -1 no node."""
    optimizer_node: int
    """Node with most of the optimizer's cores; -1 no node."""
    flags: tuple[str, ...] = ()
    """``shared``: both roles, or several ranks, use the same core. ``smt``: the roles are two hardware threads of one
    core. ``throttle_risk``: the CPU quota is below two cores a rank. ``isolated``: only CPUs without load balancing."""
    reason: str = ""


@dataclass(frozen=True)
class HostPlan:
    """The CPUs of every rank of one host."""

    ranks: tuple[RankPlan, ...]
    idle: tuple[int, ...] = ()
    """Allowed CPUs of cores that nobody uses; the second threads of used cores are not listed."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The plan as ``deepspeed-ext plan --json`` prints it."""
        names = ("local_rank", "pytorch", "optimizer", "numa_node", "flags")
        return {
            "ranks": [{name: _plain(getattr(rank, name)) for name in names} for rank in self.ranks],
            "idle": list(self.idle),
            "warnings": list(self.warnings),
        }

    def digest(self) -> str:
        """Hash by which ranks check that they hold the same plan."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def plan_host(topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest | None = None) -> HostPlan:
    """Plan all ranks of one host.

    The result depends neither on the order of ``ranks`` nor on that of the topology's cores.

    Args:
        topology: the host.
        ranks: its ranks, with local ranks that differ.
        request: what was asked for; by default half of each rank's cores go to the optimizer.

    Raises:
        ValueError: a rank has no allowed CPU that is online.
    """
    return _HostPlanner(topology, sorted(ranks, key=lambda rank: rank.local_rank), request or PlanRequest()).run()


class _HostPlanner:
    def __init__(self, topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest) -> None:
        for rank in ranks:
            if not rank.allowed & topology.cpus:
                raise ValueError(
                    f"local rank {rank.local_rank}: none of its CPUs {format_cpulist(rank.allowed) or '(none)'} is "
                    f"online (online: {format_cpulist(topology.cpus)})"
                )
        self.topology = topology
        self.ranks = ranks
        self.request = request
        self.usable = [usable_cores(topology, rank.allowed) for rank in ranks]
        self.warnings: list[str] = []

    def run(self) -> HostPlan:
        nodes = [rank.accelerator_node for rank in self.ranks]
        sharing = share_cores(self.topology, self.usable, nodes)
        plans: dict[int, RankPlan] = {}
        for pool in sharing.pools:
            plans |= self._plan_pool(pool)
        for index, core in sharing.crowded.items():
            plans[index] = self._on_one_core(index, core, crowded=True)
        ordered = tuple(plans[index] for index in range(len(self.ranks)))
        idle = self._idle(ordered)
        self._warn_about_flags(ordered)
        if idle:
            self.warnings.append(f"CPUs {format_cpulist(idle)} stay idle")
        return HostPlan(ordered, idle, tuple(self.warnings))

    def _plan_pool(self, pool: Pool) -> dict[int, RankPlan]:
        needs = {rank: self._need(rank, pool) for rank in pool.shares}
        placements = place(self.topology, pool, needs)
        plans = {}
        for rank, placement in placements.items():
            if placement.training and not placement.optimizer and self.request.separate:
                plans[rank] = self._on_one_core(rank, placement.training[0], crowded=False)
            else:
                plans[rank] = self._on_own_cores(rank, pool, needs[rank], placement)
        return plans

    def _need(self, rank: int, pool: Pool) -> Need:
        """Counts of a rank's two roles from its share, the quota and the request."""
        share = {kind: count for kind, count in sorted(pool.shares[rank].items()) if count}
        facts = self.ranks[rank]
        near = pool.cores if facts.accelerator_node is not None else _slice(pool, rank)
        home = home_node(self.topology, facts.accelerator_node, near)
        total = within_quota(sum(share.values()), facts.quota_cores, self._quota_sharers(facts))
        fastest = min(share)
        if not self.request.separate or total == 1:
            kinds = tuple(share) if total > 1 else (fastest,)
            return Need(home, total, kinds, 0, fastest, spread_training=True)
        reserved, most = self.request.pt_reserved_cores, self.request.optimizer_cores
        training, optimizer = split_cores(total, reserved, most)
        self._warn_about_split(rank, total, training, optimizer)
        training = min(training, share[fastest])
        left = share | {fastest: share[fastest] - training}
        # A static loop over equal chunks is as slow as its slowest core: one kind only.
        kind = max(left, key=lambda kind: (left[kind], -kind))
        optimizer = total - training if most is None else min(total - training, most)
        return Need(home, training, (fastest,), min(optimizer, left[kind]), kind)

    def _quota_sharers(self, facts: RankFacts) -> int:
        return sum(other.cgroup == facts.cgroup and other.quota_cores is not None for other in self.ranks)

    def _warn_about_split(self, rank: int, total: int, training: int, optimizer: int) -> None:
        reserved, most = self.request.pt_reserved_cores, self.request.optimizer_cores
        if most is not None and most > total - 1:
            self._warn(rank, f"has {total} cores: its optimizer gets {optimizer}, not {most}")
        if isinstance(reserved, int) and reserved > training:
            self._warn(rank, f"has {total} cores: PyTorch gets {training}, not {reserved}")

    def _on_own_cores(self, rank: int, pool: Pool, need: Need, placement: Placement) -> RankPlan:
        facts, usable = self.ranks[rank], self.usable[rank]
        training = tuple(sorted(pu for core in placement.training for pu in usable[core]))
        optimizer = tuple(sorted(usable[core][0] for core in placement.optimizer))
        if len({core.node for core in placement.optimizer}) > 1:
            self._warn(rank, f"optimizer is split over several NUMA nodes: none holds {len(placement.optimizer)} cores")
        owned = sum(pool.shares[rank].values())
        sharers = "of its own" if len(pool.shares) == 1 else f"of {len(pool.cores)} shared by {len(pool.shares)} ranks"
        reason = f"{owned} cores {sharers}; {self._why_home(facts, need.home)}; {self._why_split()}"
        return RankPlan(
            local_rank=facts.local_rank,
            pytorch=training,
            optimizer=optimizer,
            pytorch_threads=len(placement.training),
            numa_node=need.home,
            optimizer_node=_main_node(placement.optimizer, need.home),
            flags=tuple(self._common_flags(rank)),
            reason=reason,
        )

    def _on_one_core(self, rank: int, core: Core, *, crowded: bool) -> RankPlan:
        """A single core for both roles: its hardware threads apart if it has two, else shared."""
        facts, pus = self.ranks[rank], self.usable[rank][core]
        separate = self.request.separate
        flags = ["shared"] if crowded or (len(pus) == 1 and separate) else []
        flags += ["smt"] if len(pus) > 1 and separate else []
        return RankPlan(
            local_rank=facts.local_rank,
            pytorch=pus[:1] if separate else pus,
            optimizer=pus[1:2] or pus[:1] if separate else (),
            pytorch_threads=1,
            numa_node=core.node,
            optimizer_node=core.node,
            flags=(*flags, *self._common_flags(rank)),
            reason="more ranks than cores" if crowded else "a single core",
        )

    def _common_flags(self, rank: int) -> list[str]:
        facts = self.ranks[rank]
        flags = []
        if facts.quota_cores is not None and 2 * self._quota_sharers(facts) > facts.quota_cores:
            flags.append("throttle_risk")
        if facts.allowed & self.topology.cpus <= self.topology.isolated:
            flags.append("isolated")
        return flags

    def _why_home(self, facts: RankFacts, home: int) -> str:
        if facts.accelerator_node is None:
            return f"home node {home} holds most of them"
        if facts.accelerator_node == home:
            return f"home node {home} is the accelerator's"
        return f"home node {home} is the nearest with cores to the accelerator's node {facts.accelerator_node}"

    def _why_split(self) -> str:
        if not self.request.separate:
            return "the optimizer runs on the trainer's threads"
        if self.request.pt_reserved_cores is not None:
            return f"{self.request.pt_reserved_cores} kept for PyTorch as asked"
        if self.request.optimizer_cores is not None:
            return f"{self.request.optimizer_cores} for the optimizer as asked or tuned"
        return "half kept for PyTorch, as nothing else was asked or tuned"

    def _idle(self, plans: Sequence[RankPlan]) -> tuple[int, ...]:
        used = {self.topology.core_of[cpu] for plan in plans for cpu in (*plan.pytorch, *plan.optimizer)}
        allowed = frozenset().union(*(rank.allowed for rank in self.ranks))
        return tuple(sorted(pu for core in self.topology.cores if core not in used for pu in core.pus if pu in allowed))

    def _warn(self, rank: int, text: str) -> None:
        self.warnings.append(f"local rank {self.ranks[rank].local_rank} {text}")

    def _warn_about_flags(self, plans: Sequence[RankPlan]) -> None:
        texts: Mapping[str, str] = {
            "shared": "must share a core between PyTorch and the optimizer or between ranks: give the job more cores",
            "smt": "has one core: PyTorch and the optimizer run on its two hardware threads",
            "throttle_risk": "shares a CPU quota below two cores a rank and may be throttled: raise the quota",
            "isolated": "has only isolated CPUs: each thread is pinned to one of them",
        }
        for flag, text in texts.items():
            flagged = [str(plan.local_rank) for plan in plans if flag in plan.flags]
            if flagged:
                self.warnings.append(f"local rank {', '.join(flagged)} {text}")


def _slice(pool: Pool, rank: int) -> Sequence[Core]:
    """The rank's part of the pool if it were cut in node-major order."""
    start = sum(sum(shares.values()) for other, shares in sorted(pool.shares.items()) if other < rank)
    count = sum(pool.shares[rank].values())
    return pool.cores[start : start + count] if start + count <= len(pool.cores) else pool.cores


def _main_node(cores: Sequence[Core], default: int) -> int:
    nodes = Counter(core.node for core in cores)
    return min(nodes, key=lambda node: (-nodes[node], node), default=default)
