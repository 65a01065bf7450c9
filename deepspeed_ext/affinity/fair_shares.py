"""How many cores, and which pool of cores, each rank of a host gets; the first half of the planner.

Ranks whose allowed cores meet form a component. In a component
- where all ranks may use the same cores, every rank gets an equal number of each kind of core, and `place` later
  chooses which, so that every rank is near its accelerator;
- where the sets overlap only in part, the shares are max-min fair: the poorest rank is as rich as possible, then the
  next (leximin). That is an optimal semi-matching, found by moving cores along alternating paths from a richer rank to
  a poorer one until no path gains (Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs, 2006).
Cores that the same ranks may use, on the same node and of the same kind, are interchangeable; counting classes of them
instead of cores makes the result independent of how the kernel numbers its CPUs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_ext.affinity.topology import Core, Topology

__all__ = ["Pool", "Sharing", "home_node", "share_cores", "usable_cores"]

Ranks = tuple[int, ...]
ClassKey = tuple[int, Ranks, int, int, int]


@dataclass(frozen=True)
class Pool:
    """Cores that some ranks divide between them."""

    cores: tuple[Core, ...]
    """In node-major order."""
    shares: Mapping[int, Mapping[int, int]]
    """Number of cores for each rank, by kind of core."""


@dataclass(frozen=True)
class Sharing:
    """Every rank is in exactly one pool, or has to share a core."""

    pools: tuple[Pool, ...]
    crowded: Mapping[int, Core]
    """The one core of each rank that shares it with other ranks, because there are more ranks than cores."""


def usable_cores(topology: Topology, allowed: frozenset[int]) -> dict[Core, tuple[int, ...]]:
    """Cores a rank may be given, with those of their hardware threads that it is allowed.

    Isolated CPUs and low-power cores are left out unless there is nothing else.
    """
    allowed = (allowed - topology.isolated) or allowed
    usable = {core: tuple(pu for pu in core.pus if pu in allowed) for core in topology.cores}
    usable = {core: pus for core, pus in usable.items() if pus}
    return {core: pus for core, pus in usable.items() if not core.is_low_power} or usable


def home_node(topology: Topology, wanted: int | None, cores: Sequence[Core]) -> int:
    """The node a rank should live on: its accelerator's, else the nearest with cores; unknown: where most are."""
    held = Counter(core.node for core in cores)
    if wanted is None:
        return min(held, key=lambda node: (-held[node], node))
    return min(held, key=lambda node: (topology.distance(wanted, node), node))


def share_cores(
    topology: Topology, usable: Sequence[Iterable[Core]], accelerator_nodes: Sequence[int | None]
) -> Sharing:
    """Divide cores between ranks.

    Args:
        topology: the host.
        usable: cores that each rank may use, at least one.
        accelerator_nodes: node next to each rank's accelerator, None unknown.
    """
    sets = [frozenset(cores) for cores in usable]
    pools: list[Pool] = []
    crowded: dict[int, Core] = {}
    for ranks in _components(sets):
        cores = tuple(sorted(frozenset().union(*(sets[rank] for rank in ranks)), key=lambda core: core.order))
        if all(sets[rank] == sets[ranks[0]] for rank in ranks):
            if len(cores) < len(ranks):
                crowded |= {rank: cores[index % len(cores)] for index, rank in enumerate(ranks)}
            else:
                pools.append(Pool(cores, _equal_shares(cores, ranks)))
        else:
            owned = _fair_cores(topology, cores, ranks, sets, accelerator_nodes)
            crowded |= _crowd(owned, sets)
            pools += [
                Pool(tuple(owned[rank]), {rank: Counter(core.kind for core in owned[rank])})
                for rank in ranks
                if rank not in crowded
            ]
    return Sharing(tuple(pools), crowded)


def _components(sets: Sequence[frozenset[Core]]) -> list[Ranks]:
    """Ranks whose cores meet, directly or through other ranks; each component and the list in rank order."""
    components: list[tuple[set[int], set[Core]]] = []
    for rank, cores in enumerate(sets):
        meeting = [component for component in components if component[1] & cores]
        components = [component for component in components if not component[1] & cores]
        ranks = {rank}.union(*(component[0] for component in meeting))
        components.append((ranks, set(cores).union(*(component[1] for component in meeting))))
    return sorted(tuple(sorted(ranks)) for ranks, _ in components)


def _equal_shares(cores: Sequence[Core], ranks: Ranks) -> dict[int, dict[int, int]]:
    """Each kind divided evenly; what remains of a kind goes to the ranks with the fewest cores so far."""
    shares: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    for kind, count in sorted(Counter(core.kind for core in cores).items()):
        base, extra = divmod(count, len(ranks))
        by_wealth = sorted(ranks, key=lambda rank: (sum(shares[rank].values()), rank))
        for position, rank in enumerate(by_wealth):
            shares[rank][kind] = base + (position < extra)
    return shares


def _fair_cores(
    topology: Topology,
    cores: Sequence[Core],
    ranks: Ranks,
    sets: Sequence[frozenset[Core]],
    accelerator_nodes: Sequence[int | None],
) -> dict[int, list[Core]]:
    """Max-min fair cores of each rank of a component whose sets overlap only in part."""
    classes: dict[ClassKey, list[Core]] = {}
    for core in cores:
        users = tuple(rank for rank in ranks if core in sets[rank])
        classes.setdefault((len(users), users, core.node, core.package, core.kind), []).append(core)
    homes = {rank: home_node(topology, accelerator_nodes[rank], list(sets[rank])) for rank in ranks}
    held = _draft(topology, {key: len(members) for key, members in sorted(classes.items())}, ranks, homes)
    while path := _improving_path(held, ranks):
        for key, richer, poorer in path:
            held[key][richer] -= 1
            held[key][poorer] += 1
    owned: dict[int, list[Core]] = {rank: [] for rank in ranks}
    for key, members in sorted(classes.items()):
        left = iter(members)
        for rank in key[1]:
            owned[rank] += [next(left) for _ in range(held[key][rank])]
    return {rank: sorted(mine, key=lambda core: core.order) for rank, mine in owned.items()}


def _draft(
    topology: Topology, free: dict[ClassKey, int], ranks: Ranks, homes: Mapping[int, int]
) -> dict[ClassKey, Counter[int]]:
    """The poorest rank picks a core, nearest to its home and least wanted by others first, until nobody can."""
    held: dict[ClassKey, Counter[int]] = {key: Counter() for key in free}
    wealth: Counter[int] = Counter()
    hungry = set(ranks)
    while hungry:
        rank = min(hungry, key=lambda rank: (wealth[rank], rank))
        open_to = [key for key, count in free.items() if count and rank in key[1]]
        if not open_to:
            hungry.remove(rank)
            continue
        best = min(open_to, key=lambda key: (topology.distance(homes[rank], key[2]), key))
        free[best] -= 1
        held[best][rank] += 1
        wealth[rank] += 1
    return held


def _improving_path(held: Mapping[ClassKey, Counter[int]], ranks: Ranks) -> list[tuple[ClassKey, int, int]] | None:
    """Moves (class, from, to) that make a poorer rank richer by one at the cost of one richer by two or more."""
    wealth = {rank: sum(counts[rank] for counts in held.values()) for rank in ranks}
    for poorest in sorted(ranks, key=lambda rank: (wealth[rank], rank)):
        reached: dict[int, list[tuple[ClassKey, int, int]]] = {poorest: []}
        queue = deque([poorest])
        while queue:
            taker = queue.popleft()
            for key, counts in held.items():
                if taker not in key[1]:
                    continue
                for giver in key[1]:
                    if giver in reached or not counts[giver]:
                        continue
                    reached[giver] = [*reached[taker], (key, giver, taker)]
                    if wealth[giver] >= wealth[poorest] + 2:
                        return reached[giver]
                    queue.append(giver)
    return None


def _crowd(owned: Mapping[int, list[Core]], sets: Sequence[frozenset[Core]]) -> dict[int, Core]:
    """Ranks left without a core join the least crowded one that they may use; its owner then shares it too."""
    users: dict[Core, list[int]] = {core: [rank] for rank, cores in owned.items() for core in cores}
    for rank in (rank for rank, cores in owned.items() if not cores):
        joined = min(sets[rank], key=lambda core: (len(users.get(core, ())), core.order))
        users.setdefault(joined, []).append(rank)
    return {rank: core for core, sharing in users.items() if len(sharing) > 1 for rank in sharing}
