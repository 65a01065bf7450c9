"""Plans which CPUs of one host each rank's PyTorch threads and optimizer get: a pure function of
plain facts. `split_cores` divides a rank's cores between the two, for bound and unbound runs
alike."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from deepspeed_ext.cores.placement import (
    CoreDemand,
    Pool,
    RoleCores,
    divide_cores,
    home_node,
    place_roles,
    usable_cores,
)
from deepspeed_ext.cores.topology import Core, Topology
from deepspeed_ext.runtime.cgroup import CpuQuota
from deepspeed_ext.runtime.cpulist import format_cpulist
from deepspeed_ext.runtime.reserved_cores import DEFAULT_RESERVED_FRACTION, check_reserved_cores
from deepspeed_ext.runtime.words import counted

__all__ = [
    "HostPlan",
    "PlanRequest",
    "RankFacts",
    "RankPlan",
    "plan_host",
    "split_cores",
    "within_quota",
]


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank of the host."""

    local_rank: int
    allowed: frozenset[int]
    """CPUs that the user or scheduler allows; the plan uses no others."""
    accelerator_node: int | None = None
    """NUMA node of the rank's accelerator; None if unknown."""
    quotas: tuple[CpuQuota, ...] = ()
    """CPU quotas of the rank's control group and its ancestors. The ranks in a group share its
    quota."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user or the tuner asks for.

    Raises:
        ValueError: a value is out of its range.
    """

    pt_reserved_cores: int | float | None = None
    """Cores of a rank kept for PyTorch: a count or a fraction. None: see `split_cores`."""
    optimizer_cores: int | None = None
    """Maximum number of cores of a rank for its optimizer process. None: all that PyTorch
    leaves."""
    separate: bool = True
    """False if the optimizer runs in the trainer's own process: a rank's cores are then not
    split."""
    on_cpu: bool = False
    """The CPU is the accelerator."""

    @property
    def is_split_given(self) -> bool:
        """Whether the split of a rank's cores was configured or measured."""
        return self.pt_reserved_cores is not None or self.optimizer_cores is not None

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
    """CPUs of the trainer's threads: all allowed hardware threads of its cores."""
    optimizer: tuple[int, ...]
    """CPUs of the optimizer process: one hardware thread per core; empty if it is not a separate
    process."""
    pytorch_threads: int
    """Number of training cores, which is the number of OpenMP threads."""
    numa_node: int
    """Home node: the accelerator's if that is known; -1 if the CPUs are on no node."""
    optimizer_node: int
    """Node of the optimizer's cores; -1 if they are on no node, or on several."""
    flags: tuple[str, ...] = ()
    """``shared``: both roles, or several ranks, use one core. ``smt``: the roles use two hardware
    threads of one core. ``split``: the optimizer's cores are on several nodes, so each of its
    threads is pinned to one of them. ``throttle_risk``: the CPU quota is below two cores per rank.
    ``isolated``: the kernel balances no load on any of the rank's CPUs."""
    reason: str = ""
    """Explains the choice, for people."""


@dataclass(frozen=True)
class HostPlan:
    """The CPUs of every rank of one host."""

    ranks: tuple[RankPlan, ...]
    unbound: tuple[int, ...] = ()
    """Local ranks that are not in `ranks`, because their CPUs overlap only partly with those of
    another rank."""
    idle: tuple[int, ...] = ()
    """Allowed CPUs of unused cores; unused hardware threads of used cores are not included."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the plan as ``deepspeed-ext plan --json`` prints it."""
        names = ("local_rank", "pytorch", "optimizer", "numa_node", "flags")
        ranks = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return {"ranks": ranks, "idle": self.idle, "warnings": self.warnings}

    def digest(self) -> str:
        """Return a hash with which ranks check that they hold the same plan."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def plan_host(
    topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest | None = None
) -> HostPlan:
    """Plan all ranks of one host.

    The result does not depend on the order of ``ranks`` or of the topology's cores.

    Args:
        ranks: the host's ranks; their local ranks must differ.
        request: what is asked for; by default nothing, with accelerators present.

    Raises:
        ValueError: a rank has no allowed CPU that is online.
    """
    return _HostPlanner(
        topology, sorted(ranks, key=lambda rank: rank.local_rank), request or PlanRequest()
    ).run()


class _HostPlanner:
    def __init__(
        self, topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest
    ) -> None:
        for rank in ranks:
            if not rank.allowed & topology.cpus:
                raise ValueError(
                    f"local rank {rank.local_rank}: none of its CPUs "
                    f"{format_cpulist(rank.allowed) or '(none)'} is "
                    f"online (online: {format_cpulist(topology.cpus)})"
                )
        self.topology = topology
        self.ranks = ranks
        self.request = request
        self.usable = [usable_cores(topology, rank.allowed) for rank in ranks]
        self.sharers = Counter(quota.group for rank in ranks for quota in rank.quotas)
        self.warnings: list[str] = []

    def run(self) -> HostPlan:
        division = divide_cores(self.usable)
        plans: dict[int, RankPlan] = {}
        for pool in division.pools:
            plans |= self._plan_pool(pool)
        for index, core in division.oversubscribed.items():
            plans[index] = self._on_one_core(index, core, oversubscribed=True)
        ordered = tuple(plans[index] for index in sorted(plans))
        unbound = tuple(self.ranks[index].local_rank for index in division.unbound)
        idle = () if unbound else self._idle(ordered)
        self._warn_about_flags(ordered)
        if unbound:
            self.warnings.append(
                f"local ranks {format_cpulist(unbound)} stay unbound, because their CPUs overlap "
                "only in part: give each rank its own CPUs, or all ranks the same ones"
            )
        if idle:
            self.warnings.append(f"CPUs {format_cpulist(idle)} stay idle")
        return HostPlan(ordered, unbound, idle, tuple(self.warnings))

    def _plan_pool(self, pool: Pool) -> dict[int, RankPlan]:
        demands = {rank: self._demand(rank, pool) for rank in pool.shares}
        roles_of = place_roles(self.topology, pool, demands)
        plans = {}
        for rank, roles in roles_of.items():
            if roles.training and not roles.optimizer and self.request.separate:
                plans[rank] = self._on_one_core(rank, roles.training[0], oversubscribed=False)
            else:
                plans[rank] = self._on_own_cores(rank, pool, demands[rank], roles)
        return plans

    def _demand(self, rank: int, pool: Pool) -> CoreDemand:
        """Compute a rank's demand from its number of cores, the quota and the request."""
        counts = {kind: count for kind, count in sorted(pool.shares[rank].items()) if count}
        facts = self.ranks[rank]
        near = pool.cores if facts.accelerator_node is not None else _node_major_part(pool, rank)
        home = home_node(self.topology, facts.accelerator_node, near)
        total = within_quota(sum(counts.values()), self._quota_cores(facts))
        fastest = min(counts)
        if not self.request.separate or total == 1:
            return CoreDemand(home, total, tuple(counts), 0, fastest, spread_training=True)
        reserved, limit = self.request.pt_reserved_cores, self.request.optimizer_cores
        training, optimizer = split_cores(total, reserved, limit, on_cpu=self.request.on_cpu)
        self._warn_about_split(rank, total, training, optimizer)
        training = min(training, counts[fastest])
        left = counts | {fastest: counts[fastest] - training}
        # Use one kind only: a static loop over equal chunks is as slow as its slowest core.
        kind = max(left, key=lambda kind: (left[kind], -kind))
        optimizer = total - training if limit is None else min(total - training, limit)
        return CoreDemand(home, training, (fastest,), min(optimizer, left[kind]), kind)

    def _quota_cores(self, facts: RankFacts) -> float | None:
        """The rank's share of the tightest quota, in cores; None if there is none."""
        return min(
            (quota.cores / self.sharers[quota.group] for quota in facts.quotas), default=None
        )

    def _warn_about_split(self, rank: int, total: int, training: int, optimizer: int) -> None:
        reserved, limit = self.request.pt_reserved_cores, self.request.optimizer_cores
        if limit is not None and limit > total - 1:
            self._warn(
                rank,
                f"has {counted(total, 'core')}: its optimizer gets {optimizer} instead of {limit}",
            )
        if isinstance(reserved, int) and reserved > training:
            self._warn(
                rank, f"has {counted(total, 'core')}: PyTorch gets {training} instead of {reserved}"
            )

    def _on_own_cores(
        self, rank: int, pool: Pool, demand: CoreDemand, roles: RoleCores
    ) -> RankPlan:
        facts, usable = self.ranks[rank], self.usable[rank]
        training = tuple(sorted(pu for core in roles.training for pu in usable[core]))
        optimizer = tuple(sorted(usable[core][0] for core in roles.optimizer))
        is_split = len({core.node for core in roles.optimizer}) > 1
        if is_split and self.request.is_split_given:
            self._warn(
                rank,
                "optimizer is split over several NUMA nodes: "
                f"no node has {counted(len(roles.optimizer), 'core')}",
            )
        owned = sum(pool.shares[rank].values())
        sharers = (
            "of its own"
            if len(pool.shares) == 1
            else f"of {len(pool.cores)} shared by {counted(len(pool.shares), 'rank')}"
        )
        why = f"{self._why_home(facts, demand.home)}; {self._why_split()}"
        reason = f"{counted(owned, 'core')} {sharers}; {why}"
        return RankPlan(
            local_rank=facts.local_rank,
            pytorch=training,
            optimizer=optimizer,
            pytorch_threads=len(roles.training),
            numa_node=demand.home,
            optimizer_node=-1 if is_split else _main_node(roles.optimizer, demand.home),
            flags=(*(["split"] if is_split else []), *self._common_flags(rank)),
            reason=reason,
        )

    def _on_one_core(self, rank: int, core: Core, *, oversubscribed: bool) -> RankPlan:
        """Plan a single core for both roles: each gets a hardware thread if there are two, else
        they share one."""
        facts, pus = self.ranks[rank], self.usable[rank][core]
        separate = self.request.separate
        flags = ["shared"] if oversubscribed or (len(pus) == 1 and separate) else []
        flags += ["smt"] if len(pus) > 1 and separate else []
        return RankPlan(
            local_rank=facts.local_rank,
            pytorch=pus[:1] if separate else pus,
            optimizer=pus[1:2] or pus[:1] if separate else (),
            pytorch_threads=1,
            numa_node=core.node,
            optimizer_node=core.node,
            flags=(*flags, *self._common_flags(rank)),
            reason="more ranks than cores" if oversubscribed else "a single core",
        )

    def _common_flags(self, rank: int) -> list[str]:
        facts = self.ranks[rank]
        flags = []
        quota = self._quota_cores(facts)
        if quota is not None and quota < 2:
            flags.append("throttle_risk")
        if facts.allowed & self.topology.cpus <= self.topology.isolated:
            flags.append("isolated")
        return flags

    def _why_home(self, facts: RankFacts, home: int) -> str:
        if facts.accelerator_node is None:
            return f"home node {home} has most of them"
        if facts.accelerator_node == home:
            return f"home node {home} is the accelerator's"
        return (
            f"home node {home} is the nearest with cores "
            f"to the accelerator's node {facts.accelerator_node}"
        )

    def _why_split(self) -> str:
        if not self.request.separate:
            return "the optimizer runs on the trainer's threads"
        if self.request.pt_reserved_cores is not None:
            return f"{self.request.pt_reserved_cores} kept for PyTorch as requested"
        if self.request.optimizer_cores is not None:
            return f"{self.request.optimizer_cores} for the optimizer as requested or tuned"
        if self.request.on_cpu:
            return "half kept for PyTorch (nothing requested or tuned)"
        return "few kept for PyTorch beside an accelerator (nothing requested or tuned)"

    def _idle(self, plans: Sequence[RankPlan]) -> tuple[int, ...]:
        used = {
            self.topology.core_of[cpu] for plan in plans for cpu in (*plan.pytorch, *plan.optimizer)
        }
        allowed = frozenset().union(*(rank.allowed for rank in self.ranks))
        return tuple(
            sorted(
                pu
                for core in self.topology.cores
                if core not in used
                for pu in core.pus
                if pu in allowed
            )
        )

    def _warn(self, rank: int, text: str) -> None:
        self.warnings.append(f"local rank {self.ranks[rank].local_rank} {text}")

    def _warn_about_flags(self, plans: Sequence[RankPlan]) -> None:
        texts: Mapping[str, str] = {
            "shared": (
                "must share a core between its roles or with other ranks: give the job more cores"
            ),
            "smt": "has one core: PyTorch and the optimizer run on its two hardware threads",
            "throttle_risk": (
                "has a CPU quota below two cores per rank and may be throttled: raise the quota"
            ),
            "isolated": "has only isolated CPUs: each thread is pinned to one of them",
        }
        for flag, text in texts.items():
            flagged = [str(plan.local_rank) for plan in plans if flag in plan.flags]
            if flagged:
                which = "local rank" if len(flagged) == 1 else "each of local ranks"
                self.warnings.append(f"{which} {', '.join(flagged)} {text}")


def _node_major_part(pool: Pool, rank: int) -> Sequence[Core]:
    """Return the rank's cores if the pool were cut in node-major order."""
    start = sum(
        sum(shares.values()) for other, shares in sorted(pool.shares.items()) if other < rank
    )
    count = sum(pool.shares[rank].values())
    return pool.cores[start : start + count] if start + count <= len(pool.cores) else pool.cores


def _main_node(cores: Sequence[Core], default: int) -> int:
    nodes = Counter(core.node for core in cores)
    return min(nodes, key=lambda node: (-nodes[node], node), default=default)


FEWEST_BESIDE, MOST_BESIDE, ONE_OF = 2, 4, 8
"""Beside an accelerator PyTorch keeps one in `ONE_OF` cores, within these bounds, for kernel
launches, autograd, the courier thread and the communication library."""


def split_cores(
    total: int,
    reserved: int | float | None = None,
    optimizer: int | None = None,
    *,
    on_cpu: bool = False,
) -> tuple[int, int]:
    """Return (PyTorch's cores, the optimizer's cores): each at least 1; if ``total`` > 1, together
    at most ``total``.

    Args:
        total: cores of the rank, at least 1. A single core serves both.
        reserved: cores kept for PyTorch, a count or a fraction, rounded up. None: what
            ``optimizer`` leaves; without that half if ``on_cpu``, else an eighth, at least 2 and at
            most 4.
        optimizer: maximum number of cores for the optimizer. If both do not fit, ``reserved`` is
            reduced. None: the rest.
        on_cpu: the CPU is the accelerator, so forward and backward need cores, too.
    """
    if total == 1:
        return 1, 1
    most = total - 1 if optimizer is None else max(1, total - optimizer)
    if reserved is None:
        reserved = _unless_given(total, on_cpu) if optimizer is None else most
    if isinstance(reserved, float):
        # Round first: in binary, 0.07 * 100 is slightly above 7, and the ceiling must still be 7.
        reserved = math.ceil(round(reserved * total, 9))
    training = max(1, min(reserved, most))
    left = total - training
    return training, left if optimizer is None else min(left, optimizer)


def _unless_given(total: int, on_cpu: bool) -> int | float:
    """PyTorch's cores if no number was configured or measured."""
    if on_cpu:
        return DEFAULT_RESERVED_FRACTION
    return max(FEWEST_BESIDE, min(total // ONE_OF, MOST_BESIDE))


def within_quota(total: int, quota_cores: float | None) -> int:
    """Reduce a rank's ``total`` cores to what its share of a CPU quota can keep busy, but not below
    two."""
    return total if quota_cores is None else min(total, max(2, math.floor(quota_cores)))
