"""Reads the cores of a host from Linux's sysfs, and which of its CPUs this process may use.

Nothing is inferred from CPU numbers. Hardware threads, NUMA nodes, packages, caches and speeds all
come from sysfs, with a fallback for every file that older kernels, containers or broken firmware
leave out. The allowed CPUs are those that the user or the scheduler allows this process: no plan
uses any other. Tests supply their own directory tree.
"""

import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from deepspeed_ext.cores import initial_mask
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.cgroup import read_cpuset
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist, parse_cpumask
from deepspeed_ext.runtime.procfs import (
    numbered,
    parse_whole,
    positive,
    read_cpus,
    read_int,
    read_text,
)

__all__ = [
    "ALLOWED_VARIABLE",
    "Allowed",
    "Core",
    "OMP_BINDING_VARIABLES",
    "Topology",
    "find_allowed",
    "flat_topology",
    "omp_binding",
    "read_accelerator_node",
    "read_cache_bytes",
    "read_online",
    "read_topology",
    "status_mask",
]

# Cores whose capacity or clock differs by less than
# this fraction are of one kind (turbo bins, rounding).
SAME_KIND_FRACTION = 0.10


@dataclass(frozen=True)
class Core:
    """One physical core."""

    id: int
    """The lowest CPU number of its online hardware threads, whether allowed or not."""
    pus: tuple[int, ...]
    """CPU numbers of its online hardware threads (processing units), ascending."""
    node: int = 0
    """NUMA node; -1 if sysfs assigns none."""
    package: int = 0
    """Socket."""
    cache: int = -1
    """Lowest CPU number that shares its last-level cache; -1 if unknown."""
    kind: int = 0
    """0 for the fastest kind of core on this host, 1 for the next, and so on."""
    is_low_power: bool = False
    """Whether it is a low-power island core (LP-E); these are used only if there are no others."""

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
    """CPUs without the scheduler's load balancing (isolcpus)."""

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
        facts = asdict(self) | {"isolated": sorted(self.isolated)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_online(root: Path | str = "/") -> frozenset[int]:
    """Read the online CPUs below ``root``; empty if the tree does not list them.

    Also empty if the kernel lets this process run on CPUs that are not listed: lxcfs, in some
    containers, invents CPU numbers.
    """
    base = Path(root, "sys/devices/system/cpu")
    online = read_cpus(base, "online")
    if not online:
        online = frozenset(
            cpu for cpu, path in numbered(base, "cpu") if read_int(path / "online") != 0
        )
    is_made_up = Path(root) == Path("/") and not initial_mask.present() <= online
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
    kind_of, low_power = _read_kinds(root, online, described)
    cores = [
        Core(
            id=first,
            pus=tuple(sorted(full)),
            node=node_of.get(first, -1),
            package=_read_package(base / f"cpu{first}/topology") if first in described else 0,
            cache=_read_cache(base / f"cpu{first}/cache") if first in described else -1,
            kind=kind_of.get(first, 0),
            is_low_power=bool(full & low_power),
        )
        for first, full in siblings.items()
        if first == min(full)
    ]
    isolated = read_cpus(base, "isolated") or frozenset()
    return Topology(
        tuple(sorted(cores, key=lambda core: core.order)), nodes, distances, isolated & online
    )


def flat_topology(cpus: frozenset[int]) -> Topology:
    """Return the topology to use without sysfs: every CPU is its own core, on one node."""
    return Topology(tuple(Core(id=cpu, pus=(cpu,)) for cpu in sorted(cpus)), nodes=())


def _read_siblings(base: Path, online: frozenset[int]) -> dict[int, frozenset[int]]:
    """Read the online hardware threads of each CPU's core; a CPU with an inconsistent file is its
    own core."""
    siblings_of: dict[int, frozenset[int]] = {}
    for cpu in online:
        topology = base / f"cpu{cpu}/topology"
        found = read_cpus(topology, "core_cpus_list", "core_cpus")
        found = found or read_cpus(topology, "thread_siblings_list", "thread_siblings")
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
        for cpu in read_cpus(path, "cpulist", "cpumap") or ():
            node_of.setdefault(cpu, node)
    rows: list[tuple[int, ...]] = []
    for path in paths.values():
        row = _whole_numbers(read_text(path / "distance") or "")
        if len(row) != len(paths):
            return tuple(paths), (), node_of
        rows.append(row)
    return tuple(paths), tuple(rows), node_of


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parse the numbers in `text`; empty if any word is not a number."""
    try:
        return tuple(parse_whole(word) for word in text.split())
    except ValueError:
        return ()


def _read_package(topology: Path) -> int:
    package = read_int(topology / "physical_package_id")
    if package is not None and package >= 0:
        return package
    members = read_cpus(topology, "package_cpus_list", "package_cpus")
    members = members or read_cpus(topology, "core_siblings_list", "core_siblings")
    return min(members) if members else 0


def _read_cache(directory: Path) -> int:
    """Read the lowest CPU that shares the highest-level data cache; -1 if unknown."""
    best_level, lowest = 0, -1
    for _, index in numbered(directory, "index"):
        level = read_int(index / "level") or 0
        shared = read_cpus(index, "shared_cpu_list", "shared_cpu_map")
        if level > best_level and shared and read_text(index / "type") != "Instruction":
            best_level, lowest = level, min(shared)
    return lowest


def read_cache_bytes(root: Path | str = "/") -> int:
    """Return the bytes of all last-level caches of the host together; 0 if unknown."""
    sizes: dict[int, dict[frozenset[int], int]] = {}
    for _, cpu in numbered(Path(root, "sys/devices/system/cpu"), "cpu"):
        for _, index in numbered(cpu / "cache", "index"):
            shared = read_cpus(index, "shared_cpu_list", "shared_cpu_map") or frozenset()
            size = (read_text(index / "size") or "0").upper()
            number = positive(size.rstrip("KMG"))
            of_level = sizes.setdefault(read_int(index / "level") or 0, {})
            of_level[shared] = number << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    return sum(sizes[max(sizes)].values()) if sizes else 0


def _read_kinds(
    root: Path, online: frozenset[int], described: frozenset[int]
) -> tuple[dict[int, int], frozenset[int]]:
    """Read (kind of each CPU, low-power CPUs) from the PMUs of each kind, or else capacities, or
    else clocks."""
    names = ("cpu_core", "cpu_atom", "cpu_lowpower")
    pmus = [read_cpus(root / "sys/devices" / name, "cpus") or frozenset() for name in names]
    if pmus[0] & online and (pmus[1] | pmus[2]) & online:
        return {cpu: kind for kind in (2, 1, 0) for cpu in pmus[kind] & online}, pmus[2]
    for name in ("cpu_capacity", "cpufreq/base_frequency", "cpufreq/cpuinfo_max_freq"):
        speeds = {
            cpu: read_int(root / f"sys/devices/system/cpu/cpu{cpu}" / name) for cpu in described
        }
        known = {cpu: speed for cpu, speed in speeds.items() if speed is not None and speed > 0}
        if len(known) == len(online):
            return _group_by_speed(known), frozenset()
    return dict.fromkeys(online, 0), frozenset()


def _group_by_speed(speeds: dict[int, int]) -> dict[int, int]:
    """Group CPUs by speed: kind 0 is within 10 % of the fastest, kind 1 within 10 % of the fastest
    of the rest, ..."""
    kind_of_speed: dict[int, int] = {}
    kind, top = -1, math.inf
    for speed in sorted(set(speeds.values()), reverse=True):
        if speed < (1 - SAME_KIND_FRACTION) * top:
            kind, top = kind + 1, speed
        kind_of_speed[speed] = kind
    return {cpu: kind_of_speed[speed] for cpu, speed in speeds.items()}


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
    local = read_cpus(device, "local_cpulist", "local_cpus") or frozenset()
    # Firmware that knows nothing, or a single node, reports every CPU as local: ignore that.
    if local & topology.cpus and not local >= topology.cpus:
        votes = Counter(topology.core_of[cpu].node for cpu in local & topology.cpus)
        return max(sorted(votes), key=votes.__getitem__)
    return node if node in topology.nodes else None


ALLOWED_VARIABLE = "DSEXT_ALLOWED_CPUS"
OMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Allowed:
    """The CPUs that this process may use, where this was read, and warnings for the user."""

    cpus: frozenset[int]
    source: str
    warnings: tuple[str, ...] = ()


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
) -> Allowed:
    """Find the allowed CPUs of this process (root "/") or of the process that the tree ``root``
    describes.

    The first of these that exists is used: DSEXT_ALLOWED_CPUS; the mask from before torch was
    imported or, while core binding is in force, the CPUs found before it; the union of all threads'
    masks; the calling thread's mask; every online CPU. The result contains online CPUs only.

    Raises:
        ConfigError: DSEXT_ALLOWED_CPUS is malformed, or none of its CPUs is online.
        UnsupportedError: none of the CPUs found elsewhere is online, so the host does not describe
            itself correctly.
    """
    environ = os.environ if environ is None else environ
    live = Path(root) == Path("/")
    stated = environ.get(ALLOWED_VARIABLE)
    initial = initial_mask.initial() if live else None
    if stated:
        try:
            found = Allowed(parse_cpulist(stated), ALLOWED_VARIABLE)
        except ValueError as error:
            raise ConfigError(
                f"the environment variable {ALLOWED_VARIABLE}={stated}: {error}"
            ) from None
    elif initial is not None:
        found = Allowed(
            initial, "mask of the process before torch was imported or core binding began"
        )
    else:
        masks = _thread_masks(Path(root))
        if not masks and live:
            masks = [initial_mask.present()]
        union = frozenset().union(*masks)
        source = "union of the masks of all threads" if union else "every online CPU"
        found = _see_through_omp(
            Allowed(union or topology.cpus, source), topology, Path(root), environ
        )
    if not found.cpus & topology.cpus:
        raise (ConfigError if stated else UnsupportedError)(
            f"none of the allowed CPUs {format_cpulist(found.cpus)} ({found.source}) is online "
            f"(online: {format_cpulist(topology.cpus)})"
        )
    return replace(found, cpus=found.cpus & topology.cpus)


def _thread_masks(root: Path) -> list[frozenset[int]]:
    """Read the masks of all threads from /proc/self below ``root``; empty if they are not there."""
    tasks = [path / "status" for _, path in numbered(root / "proc/self/task", "")]
    masks = [mask for path in tasks if (mask := status_mask(path))]
    return masks or [mask for path in [root / "proc/self/status"] if (mask := status_mask(path))]


def status_mask(status: Path) -> frozenset[int] | None:
    """Read the allowed CPUs from a ``/proc/<pid>/status`` file; None if the file is gone or has no
    such line."""
    fields = dict(
        line.split(":", 1) for line in (read_text(status) or "").splitlines() if ":" in line
    )
    for name, parse in (("Cpus_allowed_list", parse_cpulist), ("Cpus_allowed", parse_cpumask)):
        try:
            mask = parse(fields.get(name, ""))
        except ValueError:
            continue
        if mask:
            return mask
    return None


def _see_through_omp(
    found: Allowed, topology: Topology, root: Path, environ: Mapping[str, str]
) -> Allowed:
    """If OpenMP may have bound the main thread to one core, use the cpuset, or only warn if there
    is none."""
    setting = omp_binding(environ)
    cores = {topology.core_of[cpu].id for cpu in found.cpus & topology.cpus}
    if setting is None or len(cores) != 1 or len(topology.cores) == 1:
        return found
    cpuset = (read_cpuset(root) or topology.cpus) & topology.cpus
    if found.cpus < cpuset < topology.cpus:
        warning = f"{setting} narrowed the mask; using the cpuset instead"
        return Allowed(cpuset, "cpuset of the control group", (warning,))
    warning = (
        f"{setting} may have narrowed the allowed CPUs to {format_cpulist(found.cpus)}; unset it, "
        f"import deepspeed_ext before torch, or list the CPUs in {ALLOWED_VARIABLE}"
    )
    return replace(found, warnings=(warning,))
