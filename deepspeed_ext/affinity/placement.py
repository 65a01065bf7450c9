"""Which cores of its pool each rank's two roles get; the second half of the planner.

First only numbers are placed on nodes, then each node is cut into contiguous blocks:
A. a few training cores of every rank at its home node, where launches are close to the accelerator;
B. every rank's optimizer in one node, because its speed is that of one node's memory: home, else the same package, else
   the nearest that fits, and split only where none fits;
C. the remaining training cores, one by one and in turn, as far as the home package goes. What is left stays idle.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_ext.affinity.fair_shares import Pool
from deepspeed_ext.affinity.topology import Core, Topology

__all__ = ["Need", "Placement", "place"]

# Launch and backward threads of one rank; they are placed before the optimizer.
TRAINING_CORES_FIRST = 4

Slot = tuple[int, int]
"""A node and a kind of core: cores of one slot are interchangeable."""


@dataclass(frozen=True)
class Need:
    """How many cores of which kind each role of a rank should get, and where."""

    home: int
    training: int
    training_kinds: tuple[int, ...]
    optimizer: int
    optimizer_kind: int
    spread_training: bool = False
    """Training cores may lie outside the home package (they also run the optimizer)."""


@dataclass
class Placement:
    """Cores of one rank's two roles."""

    training: list[Core] = field(default_factory=list)
    optimizer: list[Core] = field(default_factory=list)


def place(topology: Topology, pool: Pool, needs: Mapping[int, Need]) -> dict[int, Placement]:
    """Place the roles of the pool's ranks; the sum of all needs fits into the pool, kind by kind."""
    return _Placer(topology, pool, needs).run()


class _Placer:
    def __init__(self, topology: Topology, pool: Pool, needs: Mapping[int, Need]) -> None:
        self.topology = topology
        self.needs = dict(sorted(needs.items()))
        self.free: Counter[Slot] = Counter((core.node, core.kind) for core in pool.cores)
        self.cores = pool.cores
        self.package_of = {core.node: core.package for core in reversed(pool.cores)}
        self.training: dict[int, Counter[Slot]] = {rank: Counter() for rank in self.needs}
        self.optimizer: dict[int, Counter[Slot]] = {rank: Counter() for rank in self.needs}

    def run(self) -> dict[int, Placement]:
        self._training_at_home()
        for rank in self.needs:
            self._optimizer_in_one_node(rank)
        self._remaining_training()
        return self._cut()

    def _nodes(self, rank: int) -> list[int]:
        """All nodes of the pool, from the rank's home outwards."""
        home = self.needs[rank].home
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
        """Give the rank one more training core from the first of ``nodes`` that has one."""
        for kind in self.needs[rank].training_kinds:
            for node in nodes:
                if self.free[node, kind] > 0:
                    self.free[node, kind] -= 1
                    self.training[rank][node, kind] += 1
                    return True
        return False

    def _in_turn(self, limits: Mapping[int, int], nodes: Mapping[int, Sequence[int]]) -> None:
        """One training core after the other, rank by rank, up to each rank's limit."""
        waiting = [rank for rank in self.needs if self.training[rank].total() < limits[rank]]
        while waiting:
            waiting = [rank for rank in waiting if self._take_training(rank, nodes[rank])]
            waiting = [rank for rank in waiting if self.training[rank].total() < limits[rank]]

    def _training_at_home(self) -> None:
        first = {rank: min(need.training, TRAINING_CORES_FIRST) for rank, need in self.needs.items()}
        self._in_turn(first, {rank: [need.home] for rank, need in self.needs.items()})
        for rank, need in self.needs.items():
            if need.training and not self.training[rank]:
                self._take_training(rank, self._nodes(rank))

    def _remaining_training(self) -> None:
        nodes = {}
        for rank, need in self.needs.items():
            outwards = self._nodes(rank)
            package = self.package_of[need.home]
            nodes[rank] = [node for node in outwards if need.spread_training or self.package_of[node] == package]
        self._in_turn({rank: need.training for rank, need in self.needs.items()}, nodes)

    def _optimizer_in_one_node(self, rank: int) -> None:
        need = self.needs[rank]
        kind = need.optimizer_kind
        outwards = self._nodes(rank)
        fits = next((node for node in outwards if self.free[node, kind] >= need.optimizer), None)
        if fits is None:
            fits = next((node for node in outwards if self._make_room(rank, node)), None)
        # Largest first: as few nodes as possible if it must be split.
        for node in sorted(outwards, key=lambda node: -self.free[node, kind]) if fits is None else [fits]:
            taken = min(self.free[node, kind], need.optimizer - self.optimizer[rank].total())
            if taken > 0:
                self.free[node, kind] -= taken
                self.optimizer[rank][node, kind] += taken

    def _make_room(self, rank: int, node: int) -> bool:
        """Move training cores off ``node``, this rank's own first, if its optimizer then fits there."""
        kind = self.needs[rank].optimizer_kind
        owners = [rank, *(other for other in reversed(self.needs) if other != rank)]
        missing = self.needs[rank].optimizer - self.free[node, kind]
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

    def _cut(self) -> dict[int, Placement]:
        """Turn numbers into cores: on each node rank after rank, training before optimizer."""
        placements = {rank: Placement() for rank in self.needs}
        by_slot: dict[Slot, list[Core]] = {}
        for core in self.cores:
            by_slot.setdefault((core.node, core.kind), []).append(core)
        for slot, cores in by_slot.items():
            left = iter(cores)
            for rank, placement in placements.items():
                placement.training += [next(left) for _ in range(self.training[rank][slot])]
                placement.optimizer += [next(left) for _ in range(self.optimizer[rank][slot])]
        return placements
