"""Divides a host's cores among its ranks; the first half of the planner.

Ranks whose usable cores overlap, directly or through other ranks, form a component. If all ranks of
a component may use the same cores, every rank gets an equal number of each kind of core.
`placement` later chooses which ones, so that each is near its rank's accelerator. If each rank has
CPUs of its own, and only some cores have hardware threads of several ranks, such a core goes to the
rank with the fewest cores, if that leaves each rank one. Otherwise no rank of the component is
bound: a launcher has made their sets overlap by mistake, and threads of one rank would be confined
to cores of another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_ext.cores.topology import Core, Topology

__all__ = ["Pool", "CoreDivision", "home_node", "divide_cores", "usable_cores"]

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
    """Choose a rank's home node: the one with cores nearest to the accelerator; if unknown, the one
    with most."""
    held = Counter(core.node for core in cores)
    if wanted is None:
        return min(held, key=lambda node: (-held[node], node))
    return min(held, key=lambda node: (topology.distance(wanted, node), node))


def divide_cores(usable: Sequence[Mapping[Core, Iterable[int]]]) -> CoreDivision:
    """Divide cores among ranks.

    Args:
        usable: cores that each rank may use, at least one per rank, each with its CPUs that the
            rank may use.
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
    """The cores of ranks that have CPUs of their own; those with the fewest choose first."""
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
