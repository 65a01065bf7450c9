"""Hosts that nobody here has: their shape, as arguments of qemu, and what is done to them before
they are looked at."""

from __future__ import annotations

from dataclasses import dataclass

MIB_PER_NODE = 512


def numa(*nodes: str, distances: dict[tuple[int, int], int]) -> tuple[str, ...]:
    """Arguments for NUMA nodes with these CPU lists ("": memory alone); distances hold both
    ways."""
    arguments = ["-m", f"{MIB_PER_NODE * len(nodes)}M"]
    for node, cpus in enumerate(nodes):
        arguments += ["-object", f"memory-backend-ram,id=ram{node},size={MIB_PER_NODE}M"]
        ranges = "".join(f",cpus={part}" for part in cpus.split(",") if part)
        arguments += ["-numa", f"node,nodeid={node}{ranges},memdev=ram{node}"]
    for (a, b), distance in distances.items():
        arguments += ["-numa", f"dist,src={a},dst={b},val={distance}"]
    return tuple(arguments)


@dataclass(frozen=True)
class Guest:
    """A machine.

    Attributes:
        qemu: its shape.
        gpu_nodes: of each local rank, the NUMA node of an accelerator that it might have.
        offline: CPUs that are taken offline once it runs.
        cpuset: CPUs of the control group in which everything is done; "": no control group.
    """

    name: str
    qemu: tuple[str, ...]
    gpu_nodes: tuple[int, ...]
    offline: tuple[int, ...] = ()
    cpuset: str = ""

    def plan_arguments(self) -> list[str]:
        """For ``deepspeed-ext plan``."""
        return [word for node in self.gpu_nodes for word in ("--gpu-node", str(node))]


TWO_SOCKETS = (
    "-smp",
    "16,sockets=2,cores=4,threads=2",
    *numa("0-7", "8-15", distances={(0, 1): 21}),
)
FAR = {(0, 1): 21, (0, 2): 21, (1, 2): 21, (0, 3): 31, (1, 3): 31, (2, 3): 15}

GUESTS = (
    Guest("two-sockets", TWO_SOCKETS, (0, 1)),
    Guest(
        "four-nodes",  # the last has memory alone and is next to node 2
        ("-smp", "12,sockets=3,cores=4,threads=1", *numa("0-3", "4-7", "8-11", "", distances=FAR)),
        (3, 0, 1),
    ),
    Guest(
        # four of 16 CPUs are not plugged in, one thread and one whole core are offline
        "unplugged",
        (
            "-smp",
            "12,maxcpus=16,sockets=2,cores=4,threads=2",
            *numa("0-7", "8-15", distances={(0, 1): 21}),
        ),
        (0, 1),
        offline=(3, 4, 5),
    ),
    Guest("cpuset", TWO_SOCKETS, (0, 1), cpuset="1-6,9,12-14"),
)
