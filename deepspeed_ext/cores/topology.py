"""Reads the cores of a host from Linux's sysfs, and which of its CPUs this process may use.

Nothing is inferred from CPU numbers. Hardware threads, NUMA nodes and speeds come from sysfs, with
a fallback for every file that containers leave out. The allowed CPUs are those that the user or the
scheduler allows this process: no plan uses any other. Tests supply their own directory tree.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from deepspeed_ext import cores as masks
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.proc import (
    format_cpulist,
    numbered,
    parse_cpulist,
    read_cpus,
    read_int,
    read_text,
)

__all__ = [
    "ALLOWED_VARIABLE",
    "Core",
    "OMP_BINDING_VARIABLES",
    "Topology",
    "find_allowed",
    "omp_binding",
    "read_accelerator_node",
    "read_online",
    "read_topology",
    "thread_masks",
]

SAME_SPEED_FRACTION = 0.9
"""Cores whose capacity is at least this fraction of the fastest one's count as equal."""


@dataclass(frozen=True)
class Core:
    """One physical core."""

    id: int
    """The lowest CPU number of its online hardware threads, whether allowed or not."""
    pus: tuple[int, ...]
    """CPU numbers of its online hardware threads (processing units), ascending."""
    node: int = 0
    """NUMA node; -1 if sysfs assigns none."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: node-major."""
        return self.node, self.id


@dataclass(frozen=True)
class Topology:
    """All online cores of one host, and the distances between its NUMA nodes."""

    cores: tuple[Core, ...]
    nodes: tuple[int, ...] = (0,)
    """Every NUMA node, including those without CPUs (HBM, CXL, accelerator memory); empty if sysfs
    lists none."""
    distances: tuple[tuple[int, ...], ...] = ()
    """Row and column i belong to ``nodes[i]``; empty if unknown."""
    isolated: frozenset[int] = frozenset()
    """CPUs without the scheduler's load balancing (isolcpus); used only if there are no others."""
    is_hybrid: bool = False
    """Whether some cores are slower than others."""

    @cached_property
    def cpus(self) -> frozenset[int]:
        """Every online CPU."""
        return frozenset(self.core_of)

    @cached_property
    def core_of(self) -> dict[int, Core]:
        """The core of each online CPU."""
        return {pu: core for core in self.cores for pu in core.pus}

    def distance(self, a: int, b: int) -> int:
        """Return the relative memory distance between two nodes: 10 is local; 20 if unknown."""
        if a == b:
            return 10
        try:
            return self.distances[self.nodes.index(a)][self.nodes.index(b)]
        except (ValueError, IndexError):
            return 20

    def digest(self) -> str:
        """Return a hash that is equal for two ranks that see the same host."""
        facts = asdict(self) | {"isolated": sorted(self.isolated)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_online(root: Path | str = "/") -> frozenset[int]:
    """Read the online CPUs below ``root``; empty if the tree does not list them.

    Also empty if the kernel lets this process run on CPUs that are not listed: lxcfs, in some
    containers, invents CPU numbers.
    """
    base = Path(root, "sys/devices/system/cpu")
    online = read_cpus(base / "online")
    if not online:
        online = frozenset(
            cpu for cpu, path in numbered(base, "cpu") if read_int(path / "online") != 0
        )
    is_made_up = Path(root) == Path("/") and not masks.present_mask() <= online
    return frozenset() if is_made_up else online


def read_topology(root: Path | str = "/") -> Topology:
    """Read the host described by the ``sys`` tree below ``root``.

    Raises:
        UnsupportedError: the tree describes no CPU (not Linux, or a sandbox without sysfs).
    """
    root = Path(root)
    if root == Path("/") and not sys.platform.startswith("linux"):
        raise UnsupportedError(
            "core binding reads Linux's sysfs, "
            f"and this is {sys.platform}. Training continues unbound."
        )
    base = root / "sys/devices/system/cpu"
    online = read_online(root)
    if not online:
        raise UnsupportedError(
            f"found no online CPU under {base}, or not those that the kernel gives this process: "
            "mount /sys, and without a container's view of it (lxcfs)"
        )
    threads: dict[int, list[int]] = {}
    for cpu in sorted(online):
        topology = base / f"cpu{cpu}/topology"
        siblings = (
            read_cpus(topology / "core_cpus_list")
            or read_cpus(topology / "thread_siblings_list")
            or frozenset()
        )
        threads.setdefault(min({cpu, *siblings & online}), []).append(cpu)
    nodes, distances, node_of = _read_nodes(root / "sys/devices/system/node", online)
    cores = [Core(pus[0], tuple(pus), node_of.get(pus[0], -1)) for pus in threads.values()]
    return Topology(
        tuple(sorted(cores, key=lambda core: core.order)),
        nodes,
        distances,
        (read_cpus(base / "isolated") or frozenset()) & online,
        _is_hybrid(root, online),
    )


def _read_nodes(
    base: Path, online: frozenset[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], dict[int, int]]:
    """Read (node ids, distance rows, node of each CPU); without a node directory, every CPU is on
    node 0."""
    paths = dict(numbered(base, "node"))
    if not paths:
        return (), (), dict.fromkeys(online, 0)
    node_of = {
        cpu: node for node, path in paths.items() for cpu in read_cpus(path / "cpulist") or ()
    }
    texts = [(read_text(path / "distance") or "").split() for path in paths.values()]
    is_whole = all(len(row) == len(paths) and all(map(str.isdecimal, row)) for row in texts)
    rows = tuple(tuple(map(int, row)) for row in texts) if is_whole else ()
    return tuple(paths), rows, node_of


def _is_hybrid(root: Path, online: frozenset[int]) -> bool:
    """Whether cores differ in speed, by the PMU of each kind of core, or else by capacities."""
    devices = root / "sys/devices"
    if fast := (read_cpus(devices / "cpu_core/cpus") or frozenset()) & online:
        return fast != online
    speeds = [
        read_int(path / "cpu_capacity") or 0 for _, path in numbered(devices / "system/cpu", "cpu")
    ]
    return 0 < min(speeds, default=0) < SAME_SPEED_FRACTION * max(speeds, default=0)


def read_accelerator_node(
    topology: Topology, pci_address: str, root: Path | str = "/"
) -> int | None:
    """Return the NUMA node of the PCI device ``domain:bus:device.function``; None if the firmware
    does not report it. If it has no CPUs, the planner uses the nearest node with cores."""
    node = read_int(Path(root, "sys/bus/pci/devices", pci_address.lower(), "numa_node"))
    return node if node in {*topology.nodes, *(core.node for core in topology.cores)} else None


ALLOWED_VARIABLE = "DSEXT_ALLOWED_CPUS"
OMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def omp_binding(environ: Mapping[str, str]) -> str | None:
    """Return the setting that makes OpenMP bind threads itself, such as ``OMP_PROC_BIND=true``;
    None if none does."""
    for name in OMP_BINDING_VARIABLES:
        value = environ.get(name, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            return f"{name}={value}"
    return None


def find_allowed(
    topology: Topology, root: Path | str = "/", environ: Mapping[str, str] | None = None
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Find the allowed CPUs of this process (root "/") or of the process that the tree ``root``
    describes.

    The first of these that exists is used: DSEXT_ALLOWED_CPUS; the mask from before torch was
    imported or, while core binding is in force, the CPUs found before it; the union of all threads'
    masks; the calling thread's mask; every online CPU.

    Returns:
        Online CPUs, at least one, and warnings for the user.

    Raises:
        ConfigError: DSEXT_ALLOWED_CPUS is malformed, or none of its CPUs is online.
        UnsupportedError: none of the CPUs found elsewhere is online, so the host does not describe
            itself correctly.
    """
    environ = os.environ if environ is None else environ
    root, live = Path(root), Path(root) == Path("/")
    warnings: tuple[str, ...] = ()
    if stated := environ.get(ALLOWED_VARIABLE):
        source = ALLOWED_VARIABLE
        try:
            cpus = parse_cpulist(stated)
        except ValueError as error:
            raise ConfigError(
                f"the environment variable {ALLOWED_VARIABLE}={stated}: {error}"
            ) from None
    else:
        source = "mask of the process"
        initial, present = (masks.initial_mask(), masks.present_mask()) if live else (None, None)
        union = frozenset().union(*thread_masks(root / "proc/self").values())
        cpus = initial or union or present or topology.cpus
        setting, on = omp_binding(environ), {topology.core_of.get(cpu) for cpu in cpus}
        if initial is None and setting and len(on) == 1 < len(topology.cores):
            warnings = (
                f"{setting} may have narrowed the allowed CPUs to {format_cpulist(cpus)}; unset "
                f"it, import deepspeed_ext before torch, or list the CPUs in {ALLOWED_VARIABLE}",
            )
    if not cpus & topology.cpus:
        raise (ConfigError if stated else UnsupportedError)(
            f"none of the allowed CPUs {format_cpulist(cpus)} ({source}) is online "
            f"(online: {format_cpulist(topology.cpus)})"
        )
    return cpus & topology.cpus, warnings


def thread_masks(process: Path) -> dict[int, frozenset[int]]:
    """Read the mask of each thread, by its id, from the folder ``/proc/<pid>`` of a process; if
    that does not list its threads, only the main thread's. Threads that have ended are left out."""
    folders = dict(numbered(process / "task", "")) or {0: process}
    lines = {
        tid: re.search(r"^Cpus_allowed_list:(.*)$", read_text(folder / "status") or "", re.M)
        for tid, folder in folders.items()
    }
    return {tid: parse_cpulist(line[1]) for tid, line in lines.items() if line}
