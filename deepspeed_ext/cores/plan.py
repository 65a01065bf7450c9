"""Plans which CPUs of one host each rank's PyTorch threads and optimizer get: a pure function of
plain facts. `read_host` and `plan_text` serve commands, which run no ranks.

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
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from deepspeed_ext import cores as masks
from deepspeed_ext.cores.host import (
    Core,
    Topology,
    are_uneven,
    find_allowed,
    read_accelerator_node,
    read_topology,
)
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.runtime.proc import (
    CpuQuota,
    format_cpulist,
    read_cpu_quota_cores,
    read_cpu_quotas,
)

Usable = Mapping[Core, tuple[int, ...]]
"""The cores that a rank may use, each with its allowed CPUs, in node-major order."""


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank of the host: the CPUs that the user or scheduler allows, its
    accelerator's NUMA node (None: unknown), and the CPU quotas of its control group and of that's
    ancestors, each shared by the ranks in the group."""

    local_rank: int
    allowed: frozenset[int]
    accelerator_node: int | None = None
    quotas: tuple[CpuQuota, ...] = ()


@dataclass(frozen=True)
class PlanRequest:
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


@dataclass(frozen=True)
class RankPlan:
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
    flags: tuple[str, ...] = ()
    """``shared``: both roles, or several ranks, use one core. ``smt``: the roles use two hardware
    threads of one core. ``split``: the optimizer's cores are on several nodes, so each of its
    threads is pinned to one of them. ``throttle_risk``: the CPU quota is below two cores per
    rank."""
    reason: str = ""
    """Explains the choice, for people."""


@dataclass(frozen=True)
class HostPlan:
    """The CPUs of the ranks of one host; local ranks that stay unbound, as a warning says why; and
    allowed CPUs of unused cores (not unused hardware threads of used ones)."""

    ranks: tuple[RankPlan, ...]
    unbound: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The plan as ``deepspeed-ext plan --json`` prints it."""
        names = ("local_rank", "pytorch", "optimizer", "numa_node", "flags")
        ranks = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return {"ranks": ranks, "idle": self.idle, "warnings": self.warnings}


def plan_host(
    topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest | None = None
) -> HostPlan:
    """Plan all ranks of one host.

    The result does not depend on the order of ``ranks`` or of the topology's cores.

    Args:
        ranks: the host's ranks; their local ranks differ, and each may use a CPU of the topology.
        request: what is asked for; by default nothing, with accelerators present.
    """
    ordered = sorted(ranks, key=lambda rank: rank.local_rank)
    return _HostPlanner(topology, ordered, request or PlanRequest()).run()


def usable_cores(topology: Topology, allowed: frozenset[int]) -> Usable:
    usable = {
        core: tuple(pu for pu in core.pus if pu in allowed)
        for core in sorted(topology.cores, key=lambda core: core.order)
    }
    return {core: pus for core, pus in usable.items() if pus}


class _HostPlanner:
    """Plans the ranks of one host, in the order of their local ranks."""

    def __init__(
        self, topology: Topology, ranks: Sequence[RankFacts], request: PlanRequest
    ) -> None:
        self.topology = topology
        self.ranks = ranks
        self.request = request
        self.warnings: list[str] = []

    def run(self) -> HostPlan:
        groups: dict[tuple[tuple[Core, tuple[int, ...]], ...], list[RankFacts]] = {}
        for rank in self.ranks:
            usable = usable_cores(self.topology, rank.allowed)
            groups.setdefault(tuple(usable.items()), []).append(rank)
        holders = Counter(core for items in groups for core, _ in items)
        plans = list[RankPlan]()
        unbound: dict[str, list[int]] = {_OVERLAPPING: [], _UNEVEN: []}
        for items, members in groups.items():
            local_ranks = [rank.local_rank for rank in members]
            if any(holders[core] > 1 for core, _ in items):
                unbound[_OVERLAPPING] += local_ranks
            elif are_uneven(core for core, _ in items) and len(members) > 1:
                unbound[_UNEVEN] += local_ranks
            else:
                plans += self._plan_group(members, dict(items))
        plans.sort(key=lambda plan: plan.local_rank)
        self._warn(plans, unbound)
        left = tuple(sorted(rank for ranks in unbound.values() for rank in ranks))
        idle = () if left else self._idle(plans)
        if idle:
            self.warnings.append(f"CPUs {format_cpulist(idle)} stay idle")
        return HostPlan(tuple(plans), left, idle, tuple(self.warnings))

    def _plan_group(self, ranks: Sequence[RankFacts], usable: Usable) -> Iterator[RankPlan]:
        """Plan ranks that may use the same cores."""
        cores = list(usable)
        if len(cores) < len(ranks):
            for index, rank in enumerate(ranks):
                yield self._on_one_core(rank, cores[index % len(cores)], usable, is_crowded=True)
            return
        for rank, mine in self._divide(ranks, cores):
            if len(mine) == 1 and self.request.separate:
                yield self._on_one_core(rank, mine[0], usable, is_crowded=False)
            else:
                yield self._on_own_cores(rank, mine, usable)

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
        # neighbours have neighbouring numbers: on one socket, as a rule
        wanted = [rank.accelerator_node for rank in ranks]
        homes = [
            None if w is None else min(nodes, key=lambda node: (abs(node - w), node))
            for w in wanted
        ]
        for index, members in enumerate(self._seated(homes, places, held)):
            home = homes[members[0]] if members else None
            if home is None or home not in places[index]:
                most = Counter(core.node for core in held[index])
                home = max(most, key=lambda node: (most[node], -node))
            fast_first = sorted(held[index], key=lambda core: (-core.speed, core.order))
            left = iter(sorted(fast_first, key=lambda core: abs(core.node - home)))
            for position, member in enumerate(members):
                share = (len(held[index]) + len(members) - 1 - position) // len(members)
                limit = within_quota(share, self._quota_cores(ranks[member]))
                yield ranks[member], list(islice(left, limit))

    def _seated(
        self,
        homes: Sequence[int | None],
        places: Sequence[Sequence[int]],
        held: Sequence[Sequence[Core]],
    ) -> list[list[int]]:
        """The ranks of each place, as indices of ``homes``: the node nearest to each rank's
        accelerator. ``places`` are their nodes, and ``held`` their cores."""
        indices = range(len(places))
        wanted = Counter(index for index in indices for home in homes if home in places[index])
        seats: Counter[int] = Counter()

        def room(place: int) -> tuple[float, ...]:
            return len(held[place]) / (seats[place] + 1), wanted[place] - seats[place], -place

        for _ in homes:  # to the place that then has most cores per rank
            seats[max(indices, key=room)] += 1

        def far(rank: int, place: int) -> float:
            home = homes[rank]
            return math.inf if home is None else min(abs(node - home) for node in places[place])

        pairs = [(rank, place) for rank in range(len(homes)) for place in indices]
        seated: dict[int, int] = {}
        for rank, place in sorted(pairs, key=lambda pair: far(*pair)):  # the nearest first
            if rank not in seated and seats[place]:
                seated[rank] = place
                seats[place] -= 1
        return [[rank for rank in sorted(seated) if seated[rank] == index] for index in indices]

    def _quota_cores(self, rank: RankFacts) -> float | None:
        """The rank's share of the tightest quota, in cores; None if there is none."""
        sharers = Counter(quota.group for other in self.ranks for quota in other.quotas)
        return min((quota.cores / sharers[quota.group] for quota in rank.quotas), default=None)

    def _on_own_cores(self, rank: RankFacts, cores: Sequence[Core], usable: Usable) -> RankPlan:
        training, optimizer, why = self._split(rank, len(cores))
        rest = cores[training:]
        by_node = ([core for core in rest if core.node == other.node] for other in rest)
        chosen = next((part for part in by_node if len(part) >= optimizer), rest)[:optimizer]
        nodes = {core.node for core in chosen or cores[:1]}
        home, wanted = cores[0].node, rank.accelerator_node
        if wanted not in (None, home):
            why = f"the accelerator's node {wanted} has no cores or no room; {why}"
        return RankPlan(
            local_rank=rank.local_rank,
            pytorch=tuple(sorted(pu for core in cores[:training] for pu in usable[core])),
            optimizer=tuple(sorted(usable[core][0] for core in chosen)),
            pytorch_threads=training,
            numa_node=home,
            flags=(*(["split"] if len(nodes) > 1 else []), *self._common_flags(rank)),
            reason=why,
        )

    def _split(self, rank: RankFacts, total: int) -> tuple[int, int, str]:
        """PyTorch's cores, the optimizer's, and why."""
        reserved, limit = self.request.pt_reserved_cores, self.request.optimizer_cores
        if not self.request.separate:
            return total, 0, "the optimizer runs on the trainer's threads"
        training, optimizer = split_cores(total, reserved, limit, on_cpu=self.request.on_cpu)
        for role, got, wanted in (
            ("its optimizer", optimizer, limit),
            ("PyTorch", training, reserved),
        ):
            if isinstance(wanted, int) and wanted > got:
                self.warnings.append(
                    f"local rank {rank.local_rank} has {counted(total, 'core')}: "
                    f"{role} gets {got} instead of {wanted}"
                )
        if reserved is not None or limit is not None:
            return training, optimizer, "as requested"
        on_cpu = self.request.on_cpu
        kept = "half kept for PyTorch" if on_cpu else "few kept for PyTorch beside an accelerator"
        return training, optimizer, kept

    def _on_one_core(
        self, rank: RankFacts, core: Core, usable: Usable, *, is_crowded: bool
    ) -> RankPlan:
        """Plan a single core for both roles: each gets a hardware thread if there are two, else
        they share one."""
        is_separate, pus = self.request.separate, usable[core]
        flags = ["shared"] if is_crowded or (len(pus) == 1 and is_separate) else []
        flags += ["smt"] if len(pus) > 1 and is_separate else []
        return RankPlan(
            local_rank=rank.local_rank,
            pytorch=pus[:1] if is_separate else pus,
            optimizer=(pus[1:2] or pus[:1]) if is_separate else (),
            pytorch_threads=1,
            numa_node=core.node,
            flags=(*flags, *self._common_flags(rank)),
            reason="more ranks than cores" if is_crowded else "a single core",
        )

    def _common_flags(self, rank: RankFacts) -> list[str]:
        quota = self._quota_cores(rank)
        return ["throttle_risk"] if quota is not None and quota < 2 else []

    def _idle(self, plans: Sequence[RankPlan]) -> tuple[int, ...]:
        core_of = self.topology.core_of
        used = {core_of[cpu] for plan in plans for cpu in (*plan.pytorch, *plan.optimizer)}
        allowed = frozenset().union(*(rank.allowed for rank in self.ranks))
        return tuple(sorted(cpu for cpu in allowed & core_of.keys() if core_of[cpu] not in used))

    def _warn(self, plans: Sequence[RankPlan], unbound: Mapping[str, Sequence[int]]) -> None:
        for flag, text in _FLAG_WARNINGS.items():
            flagged = [str(plan.local_rank) for plan in plans if flag in plan.flags]
            if flagged:
                which = "local rank" if len(flagged) == 1 else "each of local ranks"
                self.warnings.append(f"{which} {', '.join(flagged)} {text}")
        for why, ranks in unbound.items():
            if ranks:
                named = f"local ranks {format_cpulist(ranks)} stay unbound"
                self.warnings.append(f"{named}, because {why}")


_OVERLAPPING = "their CPUs overlap only in part: give each rank its own CPUs, or all the same ones"
_UNEVEN = "they would divide cores of different speeds: give each rank its own CPUs"

_FLAG_WARNINGS = {
    "shared": "must share a core between its roles or with other ranks: give the job more cores",
    "smt": "has one core: PyTorch and the optimizer run on its two hardware threads",
    "throttle_risk": (
        "has a CPU quota below two cores per rank and may be throttled: raise the quota"
    ),
}

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
        beside = max(FEWEST_BESIDE, min(total // ONE_OF, MOST_BESIDE))
        unless_given = DEFAULT_RESERVED_FRACTION if on_cpu else beside
        reserved = unless_given if optimizer is None else most
    if isinstance(reserved, float):
        # Round first: in binary, 0.07 * 100 is slightly above 7, and the ceiling must still be 7.
        reserved = math.ceil(round(reserved * total, 9))
    training = max(1, min(reserved, most))
    left = total - training
    return training, left if optimizer is None else min(left, optimizer)


def within_quota(total: int, quota_cores: float | None) -> int:
    """A rank's ``total`` cores, or as many, at least two, as its share of a quota can keep busy."""
    return total if quota_cores is None else min(total, max(2, math.floor(quota_cores)))


def unbound_threads(reserved: int | float | None, local_ranks: int, *, on_cpu: bool = False) -> int:
    """The threads of an unbound optimizer process: as many as a plan would give it cores, with the
    arguments of `split_cores`. The `local_ranks` of this host share its cores evenly."""
    sharers, quota = max(1, local_ranks), read_cpu_quota_cores()
    rank_cores = within_quota(
        max(1, _count_cores() // sharers), None if quota is None else quota / sharers
    )
    _, optimizer = split_cores(rank_cores, reserved, on_cpu=on_cpu)
    return optimizer


def _count_cores() -> int:
    """The physical cores that a plan could use; CPUs if the host does not describe its cores."""
    try:
        topology = read_topology()
        return len(usable_cores(topology, find_allowed(topology)[0]))
    except (ConfigError, UnsupportedError):
        return len(masks.initial_mask() or masks.present_mask()) or os.cpu_count() or 1


def read_host(
    root: Path | str = "/", number: int | None = None
) -> tuple[Topology, tuple[RankFacts, ...], tuple[str, ...]]:
    """The host below ``root``, and `number` local ranks that may all use this process's CPUs (None:
    one for each NVIDIA GPU, or one without), for `plan_host`; and warnings.

    Raises:
        ConfigError: DSEXT_ALLOWED_CPUS contradicts the host.
        UnsupportedError: ``root`` does not describe a host.
    """
    topology, gpus = read_topology(root), sorted(Path(root, "proc/driver/nvidia/gpus").glob("*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(map(str.isdecimal, visible)):  # otherwise there are identifiers, or all are visible
        gpus = [gpus[int(number)] for number in visible if int(number) < len(gpus)]
    allowed, warnings = find_allowed(topology, root)
    quotas, count = read_cpu_quotas(root), number or len(gpus) or 1
    nodes = [read_accelerator_node(gpu.name, root) for gpu in gpus]
    padded = (nodes + [None] * count)[:count]
    ranks = (RankFacts(rank, allowed, node, quotas) for rank, node in enumerate(padded))
    return topology, tuple(ranks), warnings


def plan_text(topology: Topology, plan: HostPlan) -> str:
    """Describe the plan in a few lines: each rank's CPUs, and why."""
    threads = len(topology.cpus) / max(1, len(topology.cores))
    nodes = len({core.node for core in topology.cores})
    lines = [
        f"{counted(len(topology.cores), 'core')}, {counted(len(topology.cpus), 'CPU')} "
        f"({threads:g} per core), {counted(nodes, 'NUMA node')} "
        f"with cores{', of different speeds' if are_uneven(topology.cores) else ''}"
    ]
    for rank in plan.ranks:
        flags = f"  [{', '.join(rank.flags)}]" if rank.flags else ""
        lines.append(f"local rank {rank.local_rank} on node {rank.numa_node}{flags}")
        roles = {"pytorch": (rank.pytorch, rank.pytorch_threads)}
        if rank.optimizer:
            roles["optimizer"] = (rank.optimizer, len(rank.optimizer))
        for role, (cpus, number) in roles.items():
            lines.append(f"  {role:9} {format_cpulist(cpus)} ({counted(number, 'thread')})")
        lines.append(f"  why       {rank.reason}")
    if plan.idle:
        lines.append(f"idle {format_cpulist(plan.idle)}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)
