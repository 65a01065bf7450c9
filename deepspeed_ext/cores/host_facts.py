"""Reads the facts of one host for the commands that plan without running ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_ext.cores.allowed import find_allowed
from deepspeed_ext.cores.plan import HostPlan, RankFacts
from deepspeed_ext.cores.topology import Topology, read_topology
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.cgroup import read_cpu_quotas
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist

__all__ = ["HostFacts", "read_host"]


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
