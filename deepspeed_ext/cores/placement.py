"""Chooses the cores of a plan: first how many of which kind each rank gets, then which ones.

Between ranks. Ranks whose usable cores overlap, directly or through other ranks, form a component.
If all ranks of a component may use the same cores, every rank gets an equal number of each kind of
core. If each rank has CPUs of its own, and only some cores have hardware threads of several ranks,
such a core goes to the rank with the fewest cores, if that leaves each rank one. Otherwise no rank
of the component is bound: a launcher gave them overlapping sets by mistake, and one rank's threads
would be confined to another's cores.

Within a rank. The first three steps place numbers of cores on nodes; the last one cuts each node
into contiguous runs of cores:

A. Place a few training cores of every rank on its home node, so that kernel launches are close to
   the accelerator.
B. Place every rank's optimizer cores on one node, because the memory of that node limits their
   speed: the home node, or else one in the same package, or else the nearest that fits. Split them
   over nodes only if no node fits.
C. Place the remaining training cores one at a time, rank by rank, in the home package only. The
   rest stays idle.
D. Turn the numbers into cores.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_ext.cores.topology import Core, Topology

__all__ = [
    "CoreDemand",
    "CoreDivision",
    "Pool",
    "RoleCores",
    "divide_cores",
    "home_node",
    "place_roles",
    "usable_cores",
]

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """Cores that some ranks divide among themselves."""

    cores: tuple[Core, ...]
    """In node-major order."""
    shares: Mapping[int, Mapping[int, int]]
    """Rank -> kind of core -> number of cores."""


@dataclass(frozen=True)
class CoreDivision:
    """A host's cores divided among its ranks: each rank is in one pool, `oversubscribed` or
    `unbound`."""

    pools: tuple[Pool, ...]
    oversubscribed: Mapping[int, Core]
    """Rank -> its only core, which other ranks use too, because there are more ranks than cores."""
    unbound: Ranks = ()
    """Ranks that share only a part of their cores with another rank."""


def usable_cores(topology: Topology, allowed: frozenset[int]) -> dict[Core, tuple[int, ...]]:
    """Return the cores that a rank may use, each with its allowed CPUs.

    Isolated CPUs and low-power cores are left out unless the rank has no others.
    """
    allowed = (allowed - topology.isolated) or allowed
    usable = {core: tuple(pu for pu in core.pus if pu in allowed) for core in topology.cores}
    usable = {core: pus for core, pus in usable.items() if pus}
    return {core: pus for core, pus in usable.items() if not core.is_low_power} or usable


def home_node(topology: Topology, wanted: int | None, cores: Sequence[Core]) -> int:
    """Choose a rank's home node: the node with cores nearest to the accelerator's; if that is
    unknown (None), the node with the most cores."""
    held = Counter(core.node for core in cores)
    if wanted is None:
        return min(held, key=lambda node: (-held[node], node))
    return min(held, key=lambda node: (topology.distance(wanted, node), node))


def divide_cores(usable: Sequence[Mapping[Core, Iterable[int]]]) -> CoreDivision:
    """Divide cores among ranks.

    Args:
        usable: for each rank, the cores that it may use, at least one, each with the CPUs that it
            may use.
    """
    sets = [frozenset(cores) for cores in usable]
    pools: list[Pool] = []
    oversubscribed: dict[int, Core] = {}
    unbound: list[int] = []
    for ranks in _components(sets):
        if any(sets[rank] != sets[ranks[0]] for rank in ranks):
            cpus = [cpu for rank in ranks for pus in usable[rank].values() for cpu in pus]
            owned = _own_cores(ranks, sets)
            if len(cpus) > len(set(cpus)) or not all(owned.values()):
                unbound += ranks
            else:
                pools += [
                    Pool(mine, {rank: Counter(core.kind for core in mine)})
                    for rank, mine in owned.items()
                ]
            continue
        cores = tuple(sorted(sets[ranks[0]], key=lambda core: core.order))
        if len(cores) < len(ranks):
            oversubscribed |= {rank: cores[index % len(cores)] for index, rank in enumerate(ranks)}
        else:
            pools.append(Pool(cores, _equal_shares(cores, ranks)))
    return CoreDivision(tuple(pools), oversubscribed, tuple(sorted(unbound)))


def _components(sets: Sequence[frozenset[Core]]) -> list[Ranks]:
    """Group the ranks whose cores overlap, directly or through other ranks; in rank order."""
    components: list[tuple[set[int], set[Core]]] = []
    for rank, cores in enumerate(sets):
        meeting = [component for component in components if component[1] & cores]
        components = [component for component in components if not component[1] & cores]
        ranks = {rank}.union(*(component[0] for component in meeting))
        components.append((ranks, set(cores).union(*(component[1] for component in meeting))))
    return sorted(tuple(sorted(ranks)) for ranks, _ in components)


def _own_cores(ranks: Ranks, sets: Sequence[frozenset[Core]]) -> dict[int, tuple[Core, ...]]:
    """Divide cores among ranks with separate CPUs; the rank with the fewest cores chooses first."""
    left = set().union(*(sets[rank] for rank in ranks))
    owned = {}
    for rank in sorted(ranks, key=lambda rank: (len(sets[rank]), rank)):
        owned[rank] = tuple(sorted(sets[rank] & left, key=lambda core: core.order))
        left -= sets[rank]
    return owned


def _equal_shares(cores: Sequence[Core], ranks: Ranks) -> dict[int, dict[int, int]]:
    """Divide each kind evenly; the remainder goes to the ranks with the fewest cores so far."""
    shares: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    for kind, count in sorted(Counter(core.kind for core in cores).items()):
        base, extra = divmod(count, len(ranks))
        by_num_cores = sorted(ranks, key=lambda rank: (sum(shares[rank].values()), rank))
        for position, rank in enumerate(by_num_cores):
            shares[rank][kind] = base + (position < extra)
    return shares


# Cores for the launch and backward threads of one rank; they are placed before the optimizer's.
TRAINING_CORES_FIRST = 4

CoreClass = tuple[int, int]
"""(NUMA node, kind of core): cores of one class are interchangeable."""


@dataclass(frozen=True)
class CoreDemand:
    """Number and kinds of cores for each role of a rank, and its home node."""

    home: int
    training: int
    training_kinds: tuple[int, ...]
    optimizer: int
    optimizer_kind: int
    spread_training: bool = False
    """Whether training cores may lie outside the home package, because they also run the
    optimizer."""


@dataclass
class RoleCores:
    """Cores of one rank, by role."""

    training: list[Core] = field(default_factory=list)
    optimizer: list[Core] = field(default_factory=list)


def place_roles(
    topology: Topology, pool: Pool, demands: Mapping[int, CoreDemand]
) -> dict[int, RoleCores]:
    """Assign cores to the roles of the pool's ranks.

    Args:
        demands: rank -> its demand; for each kind, the sum must fit into the pool.
    """
    return _RolePlacer(topology, pool, demands).run()


class _RolePlacer:
    def __init__(self, topology: Topology, pool: Pool, demands: Mapping[int, CoreDemand]) -> None:
        self.topology = topology
        self.demands = dict(sorted(demands.items()))
        self.free: Counter[CoreClass] = Counter((core.node, core.kind) for core in pool.cores)
        self.cores = pool.cores
        self.package_of = {core.node: core.package for core in reversed(pool.cores)}
        self.training: dict[int, Counter[CoreClass]] = {rank: Counter() for rank in self.demands}
        self.optimizer: dict[int, Counter[CoreClass]] = {rank: Counter() for rank in self.demands}

    def run(self) -> dict[int, RoleCores]:
        self._training_at_home()
        for rank in self.demands:
            self._optimizer_in_one_node(rank)
        self._remaining_training()
        return self._assign_cores()

    def _nodes(self, rank: int) -> list[int]:
        """Order the pool's nodes by distance from the rank's home."""
        home = self.demands[rank].home
        return sorted(
            self.package_of,
            key=lambda node: (
                node != home,
                self.package_of[node] != self.package_of[home],
                self.topology.distance(home, node),
                node,
            ),
        )

    def _take_training(self, rank: int, nodes: Sequence[int]) -> bool:
        """Take one training core for the rank from the first of ``nodes`` that has one; False if
        none has."""
        for kind in self.demands[rank].training_kinds:
            for node in nodes:
                if self.free[node, kind] > 0:
                    self.free[node, kind] -= 1
                    self.training[rank][node, kind] += 1
                    return True
        return False

    def _take_in_turn(self, limits: Mapping[int, int], nodes: Mapping[int, Sequence[int]]) -> None:
        """Take training cores one at a time, rank by rank, up to each rank's limit."""
        waiting = [rank for rank in self.demands if self.training[rank].total() < limits[rank]]
        while waiting:
            waiting = [rank for rank in waiting if self._take_training(rank, nodes[rank])]
            waiting = [rank for rank in waiting if self.training[rank].total() < limits[rank]]

    def _training_at_home(self) -> None:
        first = {
            rank: min(demand.training, TRAINING_CORES_FIRST)
            for rank, demand in self.demands.items()
        }
        self._take_in_turn(first, {rank: [demand.home] for rank, demand in self.demands.items()})
        for rank, demand in self.demands.items():
            if demand.training and not self.training[rank]:
                self._take_training(rank, self._nodes(rank))

    def _remaining_training(self) -> None:
        nodes = {}
        for rank, demand in self.demands.items():
            nearest_first = self._nodes(rank)
            package = self.package_of[demand.home]
            nodes[rank] = [
                node
                for node in nearest_first
                if demand.spread_training or self.package_of[node] == package
            ]
        self._take_in_turn({rank: demand.training for rank, demand in self.demands.items()}, nodes)

    def _optimizer_in_one_node(self, rank: int) -> None:
        demand = self.demands[rank]
        kind = demand.optimizer_kind
        nearest_first = self._nodes(rank)
        fits = next(
            (node for node in nearest_first if self.free[node, kind] >= demand.optimizer), None
        )
        if fits is None:
            fits = next((node for node in nearest_first if self._make_room(rank, node)), None)
        # Largest nodes first, to split over as few nodes as possible.
        for node in (
            sorted(nearest_first, key=lambda node: -self.free[node, kind])
            if fits is None
            else [fits]
        ):
            taken = min(self.free[node, kind], demand.optimizer - self.optimizer[rank].total())
            self.free[node, kind] -= taken
            self.optimizer[rank][node, kind] += taken

    def _make_room(self, rank: int, node: int) -> bool:
        """Move training cores off ``node``, this rank's own first, if its optimizer then fits;
        False if it does not."""
        kind = self.demands[rank].optimizer_kind
        owners = [rank, *(other for other in reversed(self.demands) if other != rank)]
        missing = self.demands[rank].optimizer - self.free[node, kind]
        room = sum(self.free[other, kind] for other in self.package_of if other != node)
        if missing > min(room, sum(self.training[owner][node, kind] for owner in owners)):
            return False
        for owner in owners:
            for other in (other for other in self._nodes(owner) if other != node):
                count = min(missing, self.training[owner][node, kind], self.free[other, kind])
                self.training[owner][node, kind] -= count
                self.training[owner][other, kind] += count
                self.free[node, kind] += count
                self.free[other, kind] -= count
                missing -= count
        return True

    def _assign_cores(self) -> dict[int, RoleCores]:
        """Turn numbers into cores: on each node rank by rank, training before optimizer."""
        roles_of = {rank: RoleCores() for rank in self.demands}
        by_class: dict[CoreClass, list[Core]] = {}
        for core in self.cores:
            by_class.setdefault((core.node, core.kind), []).append(core)
        for core_class, cores in by_class.items():
            left = iter(cores)
            for rank, roles in roles_of.items():
                roles.training += [next(left) for _ in range(self.training[rank][core_class])]
                roles.optimizer += [next(left) for _ in range(self.optimizer[rank][core_class])]
        return roles_of
