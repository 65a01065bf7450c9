"""Reads the cores of a host and the CPUs that this process may use, and sets the masks of threads.

Nothing is inferred from CPU numbers. Hardware threads, NUMA nodes and speeds come from sysfs, with
a fallback for every file that containers leave out. The allowed CPUs are those that the user or the
scheduler allows this process: no plan uses any other. Tests supply their own directory tree.

Linux binds threads, not processes: setting the mask of a process id moves its main thread only, and
each later thread starts with the mask of its creator. So `confine` visits every thread, and repeats
until a pass changes nothing.

The optimizer process sets its own CPUs and threads before it imports torch, from a
`WorkerPlacement` that its parent sends. So the parent moves none of its own threads, and no numactl
binary is needed.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from deepspeed_ext import cores as masks
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.log import quoted
from deepspeed_ext.runtime.proc import (
    format_cpulist,
    numbered,
    parse_cpulist,
    read_cpus,
    read_int,
    read_text,
)


@dataclass(frozen=True)
class Core:
    id: int
    """The lowest CPU number of its online hardware threads, whether allowed or not."""
    pus: tuple[int, ...]
    """CPU numbers of its online hardware threads (processing units), ascending."""
    node: int = 0
    """NUMA node; -1 if sysfs assigns none."""
    speed: int = 0
    """More on a faster core: the kernel's capacity, or on Intel 1 for a P-core; 0: not known."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: node-major."""
        return self.node, self.id


def are_uneven(cores: Iterable[Core]) -> bool:
    """Whether some are slower."""
    speeds = [core.speed for core in cores]
    return min(speeds, default=0) < 0.9 * max(speeds, default=0)


@dataclass(frozen=True)
class Topology:
    """The online cores of one host, without isolated CPUs."""

    cores: tuple[Core, ...]

    @cached_property
    def cpus(self) -> frozenset[int]:
        return frozenset(self.core_of)

    @cached_property
    def core_of(self) -> dict[int, Core]:
        return {pu: core for core in self.cores for pu in core.pus}

    def digest(self) -> str:
        """Equal for two ranks that see the same host."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def read_topology(root: Path | str = "/") -> Topology:
    """Read the host described by the ``sys`` tree below ``root``. Isolated CPUs (isolcpus) are left
    to whoever isolated them.

    Raises:
        UnsupportedError: the tree lists no CPU (not Linux, or a sandbox), or not those that the
            kernel gives this process: lxcfs, in some containers, invents CPU numbers.
    """
    root = Path(root)
    base = root / "sys/devices/system/cpu"
    online = read_cpus(base / "online") or frozenset()
    if not online or (root == Path("/") and not masks.present_mask() <= online):
        raise UnsupportedError(
            f"found no online CPU under {base}, or not those that the kernel gives this process: "
            "mount /sys, and without a container's view of it (lxcfs)"
        )
    online -= read_cpus(base / "isolated") or frozenset()
    threads: dict[int, list[int]] = {}
    for cpu in sorted(online):
        topology = base / f"cpu{cpu}/topology"
        siblings = (
            read_cpus(topology / "core_cpus_list")
            or read_cpus(topology / "thread_siblings_list")
            or frozenset()
        )
        threads.setdefault(min({cpu, *siblings & online}), []).append(cpu)
    nodes = dict(numbered(root / "sys/devices/system/node", "node"))
    # without NUMA in the kernel there is no such folder, and all is node 0
    node_of = {
        cpu: node for node, path in nodes.items() for cpu in read_cpus(path / "cpulist") or ()
    } or dict.fromkeys(online, 0)
    fast = read_cpus(root / "sys/devices/cpu_core/cpus") or frozenset()  # a PMU of their own
    speeds = {cpu: read_int(base / f"cpu{cpu}/cpu_capacity") or int(cpu in fast) for cpu in threads}
    found = [Core(k, tuple(v), node_of.get(k, -1), speeds[k]) for k, v in threads.items()]
    return Topology(tuple(sorted(found, key=lambda core: core.order)))


def read_accelerator_node(pci_address: str, root: Path | str = "/") -> int | None:
    """The NUMA node of the PCI device ``domain:bus:device.function``, perhaps without CPUs; None if
    the firmware does not report it."""
    node = read_int(Path(root, "sys/bus/pci/devices", pci_address.lower(), "numa_node"))
    return None if node is None or node < 0 else node


ALLOWED_VARIABLE = "DSEXT_ALLOWED_CPUS"
OMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def omp_binding(environ: Mapping[str, str]) -> str | None:
    """The setting that makes OpenMP bind threads itself, such as ``OMP_PROC_BIND=true``."""
    for name in OMP_BINDING_VARIABLES:
        value = environ.get(name, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            return f"{name}={value}"
    return None


def find_allowed(
    topology: Topology, root: Path | str = "/"
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The allowed CPUs of this process (root "/") or of the process that the tree ``root``
    describes, at least one, and warnings for the user.

    The first of these that exists is used: DSEXT_ALLOWED_CPUS; the mask from before torch was
    imported or, while core binding is in force, the CPUs found before it; the union of all threads'
    masks; every online CPU.

    Raises:
        ConfigError: DSEXT_ALLOWED_CPUS is malformed, or none of its CPUs is in the topology.
        UnsupportedError: none of the CPUs found elsewhere is: the host does not describe itself
            correctly, or they are isolated.
    """
    root, live = Path(root), Path(root) == Path("/")
    initial, stated = masks.initial_mask() if live else None, os.environ.get(ALLOWED_VARIABLE)
    if stated:
        kind: type[Exception] = ConfigError
        what = f"the environment variable {ALLOWED_VARIABLE}={quoted(stated)}"
        try:
            cpus = parse_cpulist(stated)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from None
    else:
        of_threads = thread_masks(root / "proc/self").values()
        cpus = initial or frozenset().union(*of_threads) or topology.cpus
        kind, what = UnsupportedError, f"the mask {format_cpulist(cpus)}"
    if not cpus & topology.cpus:
        online = format_cpulist(topology.cpus)
        raise kind(f"{what}: none of these CPUs is online and not isolated (there are {online})")
    setting, on = omp_binding(os.environ), {topology.core_of.get(cpu) for cpu in cpus}
    if not stated and initial is None and setting and len(on) == 1 < len(topology.cores):
        return cpus & topology.cpus, (
            f"{setting} may have narrowed the allowed CPUs to {format_cpulist(cpus)}; unset it, "
            f"import deepspeed_ext before torch, or list the CPUs in {ALLOWED_VARIABLE}",
        )
    return cpus & topology.cpus, ()


def thread_masks(process: Path) -> dict[int, frozenset[int]]:
    """The mask of each thread, by its id, from a process's folder ``/proc/<pid>``; if that does not
    list its threads, only the main thread's. Threads that have ended are left out."""
    folders = dict(numbered(process / "task", "")) or {0: process}
    lines = {
        tid: re.search(r"^Cpus_allowed_list:(.*)$", read_text(folder / "status") or "", re.M)
        for tid, folder in folders.items()
    }
    return {tid: parse_cpulist(line[1]) for tid, line in lines.items() if line}


# Threads that start during a pass make another pass necessary; in practice two are enough.
MAX_PASSES = 20


def own_masks() -> dict[int, frozenset[int]]:
    """The mask of each thread of this process, by its id."""
    return thread_masks(Path("/proc/self"))


def outside(cpus: Collection[int]) -> dict[int, frozenset[int]]:
    """The threads of this process that may run outside ``cpus``."""
    return {tid: mask for tid, mask in own_masks().items() if not mask <= frozenset(cpus)}


def confine(cpus: Collection[int]) -> None:
    """Confine every thread of this process, NCCL's too, to ``cpus``, at least one. A thread that is
    already bound to some of them keeps its mask.

    Raises:
        OSError: the kernel refused or does not report the threads' masks, or a thread is still
            outside ``cpus``. All masks are restored.
    """
    target = frozenset(cpus)
    assert target, "an empty mask means every CPU to some interfaces"
    saved = own_masks()
    if not saved:
        raise OSError("cannot read the masks of this process's threads in /proc/self/task")
    try:
        for _ in range(MAX_PASSES):
            changed = False
            for tid, old in own_masks().items():
                new = old & target or target
                changed |= new != old and _set_mask(tid, new)
            if not changed:
                break
        if stray := outside(target):
            listing = ", ".join(f"{tid}: {format_cpulist(mask)}" for tid, mask in stray.items())
            raise OSError(
                f"these threads may still run outside CPUs {format_cpulist(target)}: {listing}"
            )
    except Exception:
        restore(saved)
        raise


def _set_mask(tid: int, cpus: frozenset[int]) -> bool:
    """Set a thread's mask; return False if the thread has ended."""
    try:
        os.sched_setaffinity(tid, cpus)
    except ProcessLookupError:
        return False
    return True


def restore(saved: Mapping[int, frozenset[int]]) -> None:
    """Restore every thread's saved mask; threads that started later get the main thread's. If the
    kernel refuses one, because its CPUs have left the cpuset, the thread keeps its present one."""
    default = saved.get(os.getpid()) or frozenset().union(*saved.values())
    for _ in range(MAX_PASSES):
        changed = False
        for tid, mask in own_masks().items():
            wanted = saved.get(tid, default)
            if mask != wanted:
                with suppress(OSError):
                    # no change if the kernel reduces it to the cpuset: repeating gains nothing
                    changed |= _set_mask(tid, wanted) and os.sched_getaffinity(tid) == wanted
        if not changed:
            return


@dataclass(frozen=True)
class WorkerPlacement:
    """CPUs of a process that runs one thread per CPU. Its memory is where its threads touch it
    first; if the CPUs span several memory nodes, each thread is pinned to its own CPU."""

    cpus: frozenset[int]
    pin_each_thread: bool = False

    @property
    def threads(self) -> int:
        return max(1, len(self.cpus))

    def bind_process(self) -> str | None:
        """Bind every thread of the calling process to the CPUs, and have OpenMP runtimes that are
        loaded later start one thread per CPU. The kernel pins its own threads. Return a message for
        the parent to log if binding failed; the thread count is set anyway."""
        for name in OMP_BINDING_VARIABLES:
            os.environ.pop(name, None)
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(len(self.cpus)))
        try:
            for tid in (0, *own_masks()):
                _set_mask(tid, self.cpus)
        except (OSError, AttributeError) as error:
            return f"cannot bind to CPUs {format_cpulist(self.cpus)}: {error}"
        got = frozenset(os.sched_getaffinity(0))
        if got != self.cpus:
            return f"asked for CPUs {format_cpulist(self.cpus)}, got {format_cpulist(got)}"
        return None
