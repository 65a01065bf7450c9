"""Divides a host's cores among its ranks; the first half of the planner.

Ranks whose allowed cores overlap, directly or through other ranks, form a component.
- If all ranks of a component may use the same cores, every rank gets an equal number of each kind of core. `placement`
  later chooses which ones, so that every rank is near its accelerator.
- If the sets overlap only in part, the division is max-min fair (leximin): the rank with the fewest cores gets as many
  as possible, then the next. This is an optimal semi-matching. It is found by moving cores along alternating paths from
  a rank with more cores to one with fewer, until no path helps (Harvey, Ladner, Lovász, Tamir: Semi-matchings for
  bipartite graphs, 2006).
Cores that the same ranks may use, on the same node and of the same kind, are interchangeable. The algorithm counts
classes of such cores, so the result does not depend on how the kernel numbers its CPUs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_ext.cores.topology import Core, Topology

__all__ = ["Pool", "CoreDivision", "home_node", "divide_cores", "usable_cores"]

Ranks = tuple[int, ...]
ClassKey = tuple[int, Ranks, int, int, int]


@dataclass(frozen=True)
class Pool:
    """Cores that some ranks divide among themselves."""

    cores: tuple[Core, ...]
    """In node-major order."""
    shares: Mapping[int, Mapping[int, int]]
    """Rank -> kind of core -> number of cores."""


@dataclass(frozen=True)
class CoreDivision:
    """A host's cores divided among its ranks: each rank is in exactly one pool or in `oversubscribed`."""

    pools: tuple[Pool, ...]
    oversubscribed: Mapping[int, Core]
    """Rank -> its only core, which other ranks use too, because there are more ranks than cores."""


def usable_cores(topology: Topology, allowed: frozenset[int]) -> dict[Core, tuple[int, ...]]:
    """Return the cores that a rank may use, each with its allowed CPUs.

    Isolated CPUs and low-power cores are left out unless the rank has no others.
    """
    allowed = (allowed - topology.isolated) or allowed
    usable = {core: tuple(pu for pu in core.pus if pu in allowed) for core in topology.cores}
    usable = {core: pus for core, pus in usable.items() if pus}
    return {core: pus for core, pus in usable.items() if not core.is_low_power} or usable


def home_node(topology: Topology, wanted: int | None, cores: Sequence[Core]) -> int:
    """Choose a rank's home node: the one with cores nearest to the accelerator; if unknown, the one with most."""
    held = Counter(core.node for core in cores)
    if wanted is None:
        return min(held, key=lambda node: (-held[node], node))
    return min(held, key=lambda node: (topology.distance(wanted, node), node))


def divide_cores(
    topology: Topology, usable: Sequence[Iterable[Core]], accelerator_nodes: Sequence[int | None]
) -> CoreDivision:
    """Divide cores among ranks.

    Args:
        topology: the host.
        usable: cores that each rank may use, at least one per rank.
        accelerator_nodes: NUMA node of each rank's accelerator; None if unknown.
    """
    sets = [frozenset(cores) for cores in usable]
    pools: list[Pool] = []
    oversubscribed: dict[int, Core] = {}
    for ranks in _components(sets):
        cores = tuple(sorted(frozenset().union(*(sets[rank] for rank in ranks)), key=lambda core: core.order))
        if all(sets[rank] == sets[ranks[0]] for rank in ranks):
            if len(cores) < len(ranks):
                oversubscribed |= {rank: cores[index % len(cores)] for index, rank in enumerate(ranks)}
            else:
                pools.append(Pool(cores, _equal_shares(cores, ranks)))
        else:
            owned = _fair_cores(topology, cores, ranks, sets, accelerator_nodes)
            oversubscribed |= _oversubscribe(owned, sets)
            pools += [
                Pool(tuple(owned[rank]), {rank: Counter(core.kind for core in owned[rank])})
                for rank in ranks
                if rank not in oversubscribed
            ]
    return CoreDivision(tuple(pools), oversubscribed)


def _components(sets: Sequence[frozenset[Core]]) -> list[Ranks]:
    """Group the ranks whose cores overlap, directly or through other ranks; in rank order."""
    components: list[tuple[set[int], set[Core]]] = []
    for rank, cores in enumerate(sets):
        meeting = [component for component in components if component[1] & cores]
        components = [component for component in components if not component[1] & cores]
        ranks = {rank}.union(*(component[0] for component in meeting))
        components.append((ranks, set(cores).union(*(component[1] for component in meeting))))
    return sorted(tuple(sorted(ranks)) for ranks, _ in components)


def _equal_shares(cores: Sequence[Core], ranks: Ranks) -> dict[int, dict[int, int]]:
    """Divide each kind evenly; the remainder goes to the ranks with the fewest cores so far."""
    shares: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    for kind, count in sorted(Counter(core.kind for core in cores).items()):
        base, extra = divmod(count, len(ranks))
        by_num_cores = sorted(ranks, key=lambda rank: (sum(shares[rank].values()), rank))
        for position, rank in enumerate(by_num_cores):
            shares[rank][kind] = base + (position < extra)
    return shares


def _fair_cores(
    topology: Topology,
    cores: Sequence[Core],
    ranks: Ranks,
    sets: Sequence[frozenset[Core]],
    accelerator_nodes: Sequence[int | None],
) -> dict[int, list[Core]]:
    """Divide the cores of a component whose sets overlap only in part, max-min fairly."""
    classes: dict[ClassKey, list[Core]] = {}
    for core in cores:
        users = tuple(rank for rank in ranks if core in sets[rank])
        classes.setdefault((len(users), users, core.node, core.package, core.kind), []).append(core)
    homes = {rank: home_node(topology, accelerator_nodes[rank], list(sets[rank])) for rank in ranks}
    held = _draft(topology, {key: len(members) for key, members in sorted(classes.items())}, ranks, homes)
    while path := _improving_path(held, ranks):
        for key, donor, receiver in path:
            held[key][donor] -= 1
            held[key][receiver] += 1
    owned: dict[int, list[Core]] = {rank: [] for rank in ranks}
    for key, members in sorted(classes.items()):
        left = iter(members)
        for rank in key[1]:
            owned[rank] += [next(left) for _ in range(held[key][rank])]
    return {rank: sorted(mine, key=lambda core: core.order) for rank, mine in owned.items()}


def _draft(
    topology: Topology, free: dict[ClassKey, int], ranks: Ranks, homes: Mapping[int, int]
) -> dict[ClassKey, Counter[int]]:
    """Let the rank with the fewest cores pick one, nearest to its home and usable by fewest ranks, in turn."""
    held: dict[ClassKey, Counter[int]] = {key: Counter() for key in free}
    num_cores: Counter[int] = Counter()
    open_ranks = set(ranks)
    while open_ranks:
        rank = min(open_ranks, key=lambda rank: (num_cores[rank], rank))
        available = [key for key, count in free.items() if count and rank in key[1]]
        if not available:
            open_ranks.remove(rank)
            continue
        best = min(available, key=lambda key: (topology.distance(homes[rank], key[2]), key))
        free[best] -= 1
        held[best][rank] += 1
        num_cores[rank] += 1
    return held


def _improving_path(held: Mapping[ClassKey, Counter[int]], ranks: Ranks) -> list[tuple[ClassKey, int, int]] | None:
    """Find moves (class, from, to) that give a rank one core of a rank with at least two more; None if impossible."""
    num_cores = {rank: sum(counts[rank] for counts in held.values()) for rank in ranks}
    for fewest in sorted(ranks, key=lambda rank: (num_cores[rank], rank)):
        reached: dict[int, list[tuple[ClassKey, int, int]]] = {fewest: []}
        queue = deque([fewest])
        while queue:
            receiver = queue.popleft()
            for key, counts in held.items():
                if receiver not in key[1]:
                    continue
                for donor in key[1]:
                    if donor in reached or not counts[donor]:
                        continue
                    reached[donor] = [*reached[receiver], (key, donor, receiver)]
                    if num_cores[donor] >= num_cores[fewest] + 2:
                        return reached[donor]
                    queue.append(donor)
    return None


def _oversubscribe(owned: Mapping[int, list[Core]], sets: Sequence[frozenset[Core]]) -> dict[int, Core]:
    """Add each rank without a core to the core with the fewest ranks; all ranks of that core then share it."""
    users: dict[Core, list[int]] = {core: [rank] for rank, cores in owned.items() for core in cores}
    for rank in (rank for rank, cores in owned.items() if not cores):
        joined = min(sets[rank], key=lambda core: (len(users.get(core, ())), core.order))
        users.setdefault(joined, []).append(rank)
    return {rank: core for core, ranks_of_core in users.items() if len(ranks_of_core) > 1 for rank in ranks_of_core}
