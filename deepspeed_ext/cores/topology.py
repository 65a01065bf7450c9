"""Reads the cores of a host from Linux's sysfs, and which of its CPUs this process may use.

Nothing is inferred from CPU numbers. Hardware threads, NUMA nodes, caches and speeds come from
sysfs, with a fallback for every file that containers or broken firmware leave out. The allowed CPUs
are those that the user or the scheduler allows this process: no plan uses any other. Tests supply
their own directory tree.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
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
    read_cpuset,
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

# Cores whose capacity is at least this fraction of the fastest one's count as equal.
SAME_SPEED_FRACTION = 0.9


@dataclass(frozen=True)
class Core:
    """One physical core."""

    id: int
    """The lowest CPU number of its online hardware threads, whether allowed or not."""
    pus: tuple[int, ...]
    """CPU numbers of its online hardware threads (processing units), ascending."""
    node: int = 0
    """NUMA node; -1 if sysfs assigns none."""
    cache: int = -1
    """Lowest CPU number that shares its last-level cache; -1 if unknown."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: node-major, with cores of one last-level cache together."""
        return self.node, self.cache, self.id


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
    low_power: frozenset[int] = frozenset()
    """CPUs of low-power island cores (LP-E); used only if there are no others."""
    is_hybrid: bool = False
    """Whether some cores are slower than others."""

    @cached_property
    def cpus(self) -> frozenset[int]:
        """Every online CPU."""
        return frozenset(pu for core in self.cores for pu in core.pus)

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
        sets = {"isolated": sorted(self.isolated), "low_power": sorted(self.low_power)}
        facts = asdict(self) | sets
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
    # Read only CPUs that have a directory: with a wrong `online` list, probing every CPU's files
    # could take minutes.
    described = online & frozenset(cpu for cpu, _ in numbered(base, "cpu"))
    siblings = _read_siblings(base, described) | {
        cpu: frozenset({cpu}) for cpu in online - described
    }
    nodes, distances, node_of = _read_nodes(root / "sys/devices/system/node", online)
    low_power, is_hybrid = _read_speeds(root, online)
    cores = [
        Core(
            id=first,
            pus=tuple(sorted(full)),
            node=node_of.get(first, -1),
            cache=_read_cache(base / f"cpu{first}/cache") if first in described else -1,
        )
        for first, full in siblings.items()
        if first == min(full)
    ]
    isolated = read_cpus(base / "isolated") or frozenset()
    ordered = tuple(sorted(cores, key=lambda core: core.order))
    return Topology(ordered, nodes, distances, isolated & online, low_power, is_hybrid)


def _read_siblings(base: Path, online: frozenset[int]) -> dict[int, frozenset[int]]:
    """Read the online hardware threads of each CPU's core; a CPU with an inconsistent file is its
    own core."""
    siblings_of: dict[int, frozenset[int]] = {}
    for cpu in online:
        topology = base / f"cpu{cpu}/topology"
        found = read_cpus(topology / "core_cpus_list")
        found = found or read_cpus(topology / "thread_siblings_list")
        siblings_of[cpu] = (found or frozenset()) & online
    return {
        cpu: full
        if cpu in full and all(siblings_of[other] == full for other in full)
        else frozenset({cpu})
        for cpu, full in siblings_of.items()
    }


def _read_nodes(
    base: Path, online: frozenset[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], dict[int, int]]:
    """Read (node ids, distance rows, node of each CPU); without a node directory, every CPU is on
    node 0."""
    paths = dict(numbered(base, "node"))
    if not paths:
        return (), (), dict.fromkeys(online, 0)
    node_of: dict[int, int] = {}
    for node, path in paths.items():
        for cpu in read_cpus(path / "cpulist") or ():
            node_of.setdefault(cpu, node)
    texts = [(read_text(path / "distance") or "").split() for path in paths.values()]
    is_whole = all(len(row) == len(paths) and all(map(str.isdecimal, row)) for row in texts)
    rows = tuple(tuple(map(int, row)) for row in texts) if is_whole else ()
    return tuple(paths), rows, node_of


def _read_cache(directory: Path) -> int:
    """Read the lowest CPU that shares the highest-level data cache; -1 if unknown."""
    best_level, lowest = 0, -1
    for _, index in numbered(directory, "index"):
        level = read_int(index / "level") or 0
        shared = read_cpus(index / "shared_cpu_list")
        if level > best_level and shared and read_text(index / "type") != "Instruction":
            best_level, lowest = level, min(shared)
    return lowest


def _read_speeds(root: Path, online: frozenset[int]) -> tuple[frozenset[int], bool]:
    """Read (low-power CPUs, whether cores differ in speed) from the PMU of each kind of core, or
    else from capacities."""
    names = ("cpu_core", "cpu_atom", "cpu_lowpower")
    kinds = [read_cpus(root / f"sys/devices/{name}/cpus") or frozenset() for name in names]
    if kinds[0] & online:
        return kinds[2] & online, bool((kinds[1] | kinds[2]) & online)
    base = root / "sys/devices/system/cpu"
    speeds = [read_int(path / "cpu_capacity") or 0 for cpu, path in numbered(base, "cpu")]
    is_hybrid = min(speeds, default=0) < SAME_SPEED_FRACTION * max(speeds, default=0)
    return frozenset(), is_hybrid and min(speeds) > 0


def read_accelerator_node(
    topology: Topology, pci_address: str, root: Path | str = "/"
) -> int | None:
    """Return the NUMA node of the PCI device ``domain:bus:device.function``; None if the firmware
    does not report it.

    A node without CPUs is returned only if the device's local CPUs name no other one; the planner
    then uses the nearest node with cores.
    """
    device = Path(root, "sys/bus/pci/devices", pci_address.lower())
    node = read_int(device / "numa_node")
    if any(core.node == node for core in topology.cores):
        return node
    local = read_cpus(device / "local_cpulist") or frozenset()
    # Firmware that knows nothing, or a single node, reports every CPU as local: ignore that.
    if local & topology.cpus and not local >= topology.cpus:
        votes = Counter(topology.core_of[cpu].node for cpu in local & topology.cpus)
        return max(sorted(votes), key=votes.__getitem__)
    return node if node in topology.nodes else None


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
    stated = environ.get(ALLOWED_VARIABLE)
    warnings: tuple[str, ...] = ()
    if stated:
        source = ALLOWED_VARIABLE
        try:
            cpus = parse_cpulist(stated)
        except ValueError as error:
            raise ConfigError(
                f"the environment variable {ALLOWED_VARIABLE}={stated}: {error}"
            ) from None
    else:
        source = "mask of the process"
        initial = masks.initial_mask() if live else None
        if initial is None:
            union = frozenset().union(*thread_masks(root / "proc/self").values())
            present = masks.present_mask() if live else None
            initial, warnings = _see_through_omp(
                union or present or topology.cpus, topology, root, environ
            )
        cpus = initial
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


def _see_through_omp(
    cpus: frozenset[int], topology: Topology, root: Path, environ: Mapping[str, str]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """If OpenMP may have bound the main thread to one core, use the cpuset, or only warn if there
    is none."""
    setting = omp_binding(environ)
    cores = {topology.core_of[cpu].id for cpu in cpus & topology.cpus}
    if setting is None or len(cores) != 1 or len(topology.cores) == 1:
        return cpus, ()
    cpuset = (read_cpuset(root) or topology.cpus) & topology.cpus
    if cpus < cpuset < topology.cpus:
        return cpuset, (f"{setting} narrowed the mask; using the cpuset instead",)
    warning = (
        f"{setting} may have narrowed the allowed CPUs to {format_cpulist(cpus)}; unset it, "
        f"import deepspeed_ext before torch, or list the CPUs in {ALLOWED_VARIABLE}"
    )
    return cpus, (warning,)
