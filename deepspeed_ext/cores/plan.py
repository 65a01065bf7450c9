"""Plans which CPUs of one host each rank's PyTorch threads and optimizer get: a pure function of
plain facts.

Ranks with the same CPUs divide them. Each NUMA node takes as many of the ranks as its cores allow
evenly, those whose accelerator is on it first, and gives each an equal slice of whole cores; so a
rank's threads and its optimizer are on one node, and no two ranks sit crosswise. With fewer ranks
than nodes, each rank gets several whole nodes. Ranks whose CPUs overlap only in part stay unbound:
one rank's threads would be confined to another's cores. So do ranks that would divide cores of
different speeds, because every step waits for the slowest rank.

Within a rank, PyTorch keeps the first cores of the slice, with all their hardware threads, and the
optimizer gets one hardware thread of each remaining core, because its pass is memory-bound.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from deepspeed_ext.cores.topology import Core, Topology
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.runtime.proc import CpuQuota, format_cpulist

__all__ = [
    "HostPlan",
    "PlanRequest",
    "RankFacts",
    "RankPlan",
    "plan_host",
    "split_cores",
    "usable_cores",
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
    """What the user asks for."""

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
        """Whether the split of a rank's cores was configured."""
        return self.pt_reserved_cores is not None or self.optimizer_cores is not None


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
    """Node of the first training core; -1 if it is on no node."""
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
    """Local ranks that are not in `ranks`; a warning says why."""
    idle: tuple[int, ...] = ()
    """Allowed CPUs of unused cores; unused hardware threads of used cores are not included."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the plan as ``deepspeed-ext plan --json`` prints it."""
        names = ("local_rank", "pytorch", "optimizer", "numa_node", "flags")
        ranks = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return {"ranks": ranks, "idle": self.idle, "warnings": self.warnings}


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
    for rank in ranks:
        if not rank.allowed & topology.cpus:
            raise ValueError(
                f"local rank {rank.local_rank}: none of its CPUs "
                f"{format_cpulist(rank.allowed) or '(none)'} is "
                f"online (online: {format_cpulist(topology.cpus)})"
            )
    ordered = sorted(ranks, key=lambda rank: rank.local_rank)
    return _HostPlanner(topology, ordered, request or PlanRequest()).run()


def usable_cores(topology: Topology, allowed: frozenset[int]) -> dict[Core, tuple[int, ...]]:
    """Return the cores that a rank may use, each with its allowed CPUs, in node-major order.

    Isolated CPUs and low-power cores are left out unless the rank has no others.
    """
    allowed = allowed - topology.isolated - topology.low_power or allowed
    usable = {
        core: tuple(pu for pu in core.pus if pu in allowed)
        for core in sorted(topology.cores, key=lambda core: core.order)
    }
    return {core: pus for core, pus in usable.items() if pus}


@dataclass
class _HostPlanner:
    topology: Topology
    ranks: Sequence[RankFacts]
    request: PlanRequest
    warnings: list[str] = field(default_factory=list)

    def run(self) -> HostPlan:
        groups: dict[tuple[tuple[Core, tuple[int, ...]], ...], list[RankFacts]] = {}
        for rank in self.ranks:
            usable = usable_cores(self.topology, rank.allowed)
            groups.setdefault(tuple(usable.items()), []).append(rank)
        holders = Counter(core for items in groups for core, _ in items)
        plans, overlapping, uneven = list[RankPlan](), list[int](), list[int]()
        for items, members in groups.items():
            local_ranks = [rank.local_rank for rank in members]
            if any(holders[core] > 1 for core, _ in items):
                overlapping += local_ranks
            elif self.topology.is_hybrid and len(members) > 1:
                uneven += local_ranks
            else:
                plans += self._plan_group(members, dict(items))
        plans.sort(key=lambda plan: plan.local_rank)
        self._warn_about_flags(plans)
        self._warn_unbound(overlapping, "their CPUs overlap only in part", ", or all the same ones")
        self._warn_unbound(uneven, "they would divide cores of different speeds", "")
        unbound = tuple(sorted(overlapping + uneven))
        idle = () if unbound else self._idle(plans)
        if idle:
            self.warnings.append(f"CPUs {format_cpulist(idle)} stay idle")
        return HostPlan(tuple(plans), unbound, idle, tuple(self.warnings))

    def _plan_group(
        self, ranks: Sequence[RankFacts], usable: dict[Core, tuple[int, ...]]
    ) -> Iterator[RankPlan]:
        """Plan ranks that may use the same cores."""
        cores = list(usable)
        if len(cores) < len(ranks):
            for index, rank in enumerate(ranks):
                core = cores[index % len(cores)]
                yield self._on_one_core(rank, core, usable[core], is_crowded=True)
            return
        if len(ranks) == 1:
            whose = f"{counted(len(cores), 'core')} of its own"
        else:
            whose = f"a slice of {len(cores)} cores shared by {len(ranks)} ranks"
        for rank, mine in self._divide(ranks, cores):
            if len(mine) == 1 and self.request.separate:
                yield self._on_one_core(rank, mine[0], usable[mine[0]], is_crowded=False)
            else:
                yield self._on_own_cores(rank, mine, usable, whose)

    def _divide(
        self, ranks: Sequence[RankFacts], cores: Sequence[Core]
    ) -> Iterator[tuple[RankFacts, list[Core]]]:
        """Yield each rank with its cores, nearest to its home first; at least as many cores as
        ranks."""
        nodes = sorted({core.node for core in cores})
        number = min(len(nodes), len(ranks))
        cuts = [index * len(nodes) // number for index in range(number + 1)]
        places = [nodes[first:last] for first, last in pairwise(cuts)]
        held = [[core for core in cores if core.node in place] for place in places]
        homes = [self._nearest(rank.accelerator_node, nodes) for rank in ranks]
        for index, members in enumerate(_seated(self.topology, homes, places, held)):
            home = homes[members[0]] if members else None
            if home is None or home not in places[index]:
                most = Counter(core.node for core in held[index])
                home = max(most, key=lambda node: (most[node], -node))
            near_first = sorted(
                held[index], key=lambda core: (self.topology.distance(home, core.node), core.order)
            )
            left = iter(near_first)
            for position, member in enumerate(members):
                share = (len(near_first) + len(members) - 1 - position) // len(members)
                limit = within_quota(share, self._quota_cores(ranks[member]))
                yield ranks[member], list(islice(left, limit))

    def _nearest(self, wanted: int | None, nodes: Sequence[int]) -> int | None:
        if wanted is None:
            return None
        return min(nodes, key=lambda node: (self.topology.distance(wanted, node), node))

    def _quota_cores(self, rank: RankFacts) -> float | None:
        """The rank's share of the tightest quota, in cores; None if there is none."""
        sharers = Counter(quota.group for other in self.ranks for quota in other.quotas)
        return min((quota.cores / sharers[quota.group] for quota in rank.quotas), default=None)

    def _on_own_cores(
        self,
        rank: RankFacts,
        cores: Sequence[Core],
        usable: dict[Core, tuple[int, ...]],
        whose: str,
    ) -> RankPlan:
        training, optimizer = len(cores), 0
        if self.request.separate:
            reserved, limit = self.request.pt_reserved_cores, self.request.optimizer_cores
            training, optimizer = split_cores(
                len(cores), reserved, limit, on_cpu=self.request.on_cpu
            )
            for role, got, wanted in (
                ("its optimizer", optimizer, limit),
                ("PyTorch", training, reserved),
            ):
                if isinstance(wanted, int) and wanted > got:
                    self.warnings.append(
                        f"local rank {rank.local_rank} has {counted(len(cores), 'core')}: "
                        f"{role} gets {got} instead of {wanted}"
                    )
        rest = cores[training:]
        by_node = ([core for core in rest if core.node == other.node] for other in rest)
        chosen = next((part for part in by_node if len(part) >= optimizer), rest)[:optimizer]
        nodes = {core.node for core in chosen or cores[:1]}
        home = cores[0].node
        return RankPlan(
            local_rank=rank.local_rank,
            pytorch=tuple(sorted(pu for core in cores[:training] for pu in usable[core])),
            optimizer=tuple(sorted(usable[core][0] for core in chosen)),
            pytorch_threads=training,
            numa_node=home,
            optimizer_node=min(nodes) if len(nodes) == 1 else -1,
            flags=(*(["split"] if len(nodes) > 1 else []), *self._common_flags(rank)),
            reason=f"{whose}; {_why_home(rank, home)}; {self._why_split()}",
        )

    def _on_one_core(
        self, rank: RankFacts, core: Core, pus: tuple[int, ...], *, is_crowded: bool
    ) -> RankPlan:
        """Plan a single core for both roles: each gets a hardware thread if there are two, else
        they share one."""
        is_separate = self.request.separate
        flags = ["shared"] if is_crowded or (len(pus) == 1 and is_separate) else []
        flags += ["smt"] if len(pus) > 1 and is_separate else []
        return RankPlan(
            local_rank=rank.local_rank,
            pytorch=pus[:1] if is_separate else pus,
            optimizer=(pus[1:2] or pus[:1]) if is_separate else (),
            pytorch_threads=1,
            numa_node=core.node,
            optimizer_node=core.node,
            flags=(*flags, *self._common_flags(rank)),
            reason="more ranks than cores" if is_crowded else "a single core",
        )

    def _common_flags(self, rank: RankFacts) -> list[str]:
        quota = self._quota_cores(rank)
        flags = ["throttle_risk"] if quota is not None and quota < 2 else []
        if rank.allowed & self.topology.cpus <= self.topology.isolated:
            flags.append("isolated")
        return flags

    def _why_split(self) -> str:
        if not self.request.separate:
            return "the optimizer runs on the trainer's threads"
        if self.request.pt_reserved_cores is not None:
            return f"{self.request.pt_reserved_cores} kept for PyTorch as requested"
        if self.request.optimizer_cores is not None:
            return f"{self.request.optimizer_cores} for the optimizer as requested"
        if self.request.on_cpu:
            return "half kept for PyTorch"
        return "few kept for PyTorch beside an accelerator"

    def _idle(self, plans: Sequence[RankPlan]) -> tuple[int, ...]:
        core_of = self.topology.core_of
        used = {core_of[cpu] for plan in plans for cpu in (*plan.pytorch, *plan.optimizer)}
        allowed = frozenset().union(*(rank.allowed for rank in self.ranks))
        return tuple(sorted(cpu for cpu in allowed & core_of.keys() if core_of[cpu] not in used))

    def _warn_unbound(self, local_ranks: Sequence[int], why: str, or_else: str) -> None:
        if local_ranks:
            self.warnings.append(
                f"local ranks {format_cpulist(local_ranks)} stay unbound, because {why}: "
                f"give each rank its own CPUs{or_else}"
            )

    def _warn_about_flags(self, plans: Sequence[RankPlan]) -> None:
        texts = {
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


def _seated(
    topology: Topology,
    homes: Sequence[int | None],
    places: Sequence[Sequence[int]],
    held: Sequence[Sequence[Core]],
) -> list[list[int]]:
    """Return the ranks of each place, as indices of ``homes``.

    Args:
        homes: node nearest to each rank's accelerator; None if that is unknown.
        places: nodes of each place.
        held: cores of each place.
    """
    indices = range(len(places))
    wanted = Counter(index for index in indices for home in homes if home in places[index])
    seats: Counter[int] = Counter()
    for _ in homes:  # to the place that then has most cores per rank
        seats[
            max(indices, key=lambda i: (len(held[i]) / (seats[i] + 1), wanted[i] - seats[i], -i))
        ] += 1
    seated: list[list[int]] = [[] for _ in places]
    for is_home_free in (True, False):
        for rank, home in enumerate(homes):
            open_places = [index for index in indices if len(seated[index]) < seats[index]]
            if is_home_free:
                open_places = [index for index in open_places if home in places[index]]
            if open_places and not any(rank in members for members in seated):
                nearest = min(
                    open_places,
                    key=lambda i: 0 if home is None else topology.distance(home, places[i][0]),
                )
                seated[nearest].append(rank)
    return [sorted(members) for members in seated]


def _why_home(rank: RankFacts, home: int) -> str:
    if rank.accelerator_node is None:
        return f"on node {home}"
    if rank.accelerator_node == home:
        return f"on node {home}, the accelerator's"
    return f"on node {home}; the accelerator's node {rank.accelerator_node} has no cores or no room"


DEFAULT_RESERVED_FRACTION = 0.5
"""Fraction of a rank's cores kept for PyTorch by default if the CPU is the accelerator, and
DeepSpeed's default for ``pt_reserved_cores_perc``."""
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
