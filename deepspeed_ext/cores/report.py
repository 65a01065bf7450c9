"""Reads one host and prints its plan, for commands that run no ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_ext.cores.plan import HostPlan, RankFacts
from deepspeed_ext.cores.topology import Topology, find_allowed, read_topology
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.log import counted
from deepspeed_ext.runtime.proc import format_cpulist, parse_cpulist, read_cpu_quotas

__all__ = ["HostFacts", "plan_text", "read_host"]


@dataclass(frozen=True)
class HostFacts:
    """The arguments of `plan_host`, and warnings from reading them."""

    topology: Topology
    ranks: tuple[RankFacts, ...]
    warnings: tuple[str, ...] = ()

    def with_warnings(self, plan: HostPlan) -> HostPlan:
        """Return ``plan`` with the reading warnings before its own."""
        return replace(plan, warnings=self.warnings + plan.warnings)


def read_host(
    root: Path | str,
    allowed: Sequence[str] | None = None,
    accelerator_nodes: Sequence[int | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> HostFacts:
    """Read the host below ``root`` for the given local ranks.

    Args:
        root: directory that holds ``sys`` and ``proc``.
        allowed: CPU list of each local rank. None: every rank may use this process's CPUs.
        accelerator_nodes: NUMA node of each local rank's accelerator. None: unknown.
        environ: environment variables; by default this process's own.

    Raises:
        ConfigError: the arguments contradict each other or the host.
        UnsupportedError: ``root`` does not describe a host.
    """
    if not Path(root).is_dir():
        raise ConfigError(f"--root {root} is not a directory; give the one that holds sys and proc")
    topology = read_topology(root)
    if allowed and accelerator_nodes and len(allowed) != len(accelerator_nodes):
        raise ConfigError(
            f"{len(allowed)} CPU lists (--allowed) but {len(accelerator_nodes)} accelerator nodes "
            "(--gpu-node): give each option once per local rank"
        )
    number = len(allowed or accelerator_nodes or [None])
    nodes = [_check_node(topology, node) for node in accelerator_nodes or [None] * number]
    warnings: list[str] = []
    if allowed:
        masks = [
            _parse_allowed(topology, rank, text, warnings) for rank, text in enumerate(allowed)
        ]
    else:
        found = find_allowed(topology, root, environ)
        masks = [found.cpus] * number
        warnings += found.warnings
    quotas = read_cpu_quotas(root)
    ranks = tuple(RankFacts(rank, masks[rank], nodes[rank], quotas) for rank in range(number))
    return HostFacts(topology, ranks, tuple(warnings))


def _parse_allowed(topology: Topology, rank: int, text: str, warnings: list[str]) -> frozenset[int]:
    try:
        cpus = parse_cpulist(text)
    except ValueError as error:
        raise ConfigError(f"--allowed {text!r}: {error}") from None
    online = cpus & topology.cpus
    if not online:
        raise ConfigError(
            f"--allowed {text!r}: none of these CPUs is online (online: "
            f"{format_cpulist(topology.cpus)})"
        )
    if online != cpus:
        warnings.append(
            f"local rank {rank}: CPUs {format_cpulist(cpus - online)} are offline and not used"
        )
    return online


def _check_node(topology: Topology, node: int | None) -> int | None:
    if node is not None and topology.nodes and node not in topology.nodes:
        raise ConfigError(
            f"--gpu-node {node}: this host has no such NUMA node (nodes: "
            f"{format_cpulist(topology.nodes)})"
        )
    return node


def plan_text(topology: Topology, plan: HostPlan) -> str:
    """Describe the plan in a few lines: each rank's CPUs, and why."""
    threads = len(topology.cpus) / max(1, len(topology.cores))
    nodes = len({core.node for core in topology.cores})
    lines = [
        f"{counted(len(topology.cores), 'core')}, {counted(len(topology.cpus), 'CPU')} "
        f"({threads:g} per core), {counted(nodes, 'NUMA node')} "
        f"with cores{', of different speeds' if topology.is_hybrid else ''}"
    ]
    for rank in plan.ranks:
        flags = f"  [{', '.join(rank.flags)}]" if rank.flags else ""
        lines.append(f"local rank {rank.local_rank} on node {rank.numa_node}{flags}")
        threads_there = counted(rank.pytorch_threads, "thread")
        lines.append(f"  pytorch   {format_cpulist(rank.pytorch)} ({threads_there})")
        if rank.optimizer:
            threads_there = counted(len(rank.optimizer), "thread")
            lines.append(f"  optimizer {format_cpulist(rank.optimizer)} ({threads_there})")
        lines.append(f"  why       {rank.reason}")
    if plan.idle:
        lines.append(f"idle {format_cpulist(plan.idle)}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)
