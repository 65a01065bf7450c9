"""Reads one host and prints or draws its plan, for commands that run no ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from deepspeed_ext.cores.plan import HostPlan, RankFacts
from deepspeed_ext.cores.topology import Core, Topology, find_allowed, read_topology
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.cgroup import read_cpu_quotas
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist
from deepspeed_ext.runtime.words import counted

__all__ = ["HostFacts", "plan_svg", "plan_text", "read_host"]


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


CELL, ROW, GAP, MARGIN, CORES_PER_ROW = 56, 30, 6, 14, 8
"""Sizes in pixels. Few columns and large letters keep the picture readable in a narrow window."""
LETTERS, LINE = 17, 28
# One hue per rank; dark for PyTorch, light for the optimizer. Hues repeat after eight ranks.
HUES = (212, 28, 140, 340, 265, 52, 180, 0)


def plan_text(topology: Topology, plan: HostPlan) -> str:
    """Describe the plan in a few lines: each rank's CPUs, and why."""
    threads = len(topology.cpus) / max(1, len(topology.cores))
    kinds = len({core.kind for core in topology.cores})
    nodes = len({core.node for core in topology.cores})
    lines = [
        f"{counted(len(topology.cores), 'core')}, {counted(len(topology.cpus), 'CPU')} "
        f"({threads:g} per core), {counted(nodes, 'NUMA node')} "
        f"with cores, {counted(kinds, 'kind')} of core"
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


def plan_svg(topology: Topology, plan: HostPlan) -> str:
    """Draw the plan as SVG: a frame per NUMA node, a box per core, a cell per hardware thread."""
    owner = {cpu: (rank.local_rank, "opt") for rank in plan.ranks for cpu in rank.optimizer}
    owner |= {
        cpu: (rank.local_rank, "pt")
        for rank in plan.ranks
        for cpu in rank.pytorch
        if cpu not in owner
    }
    shared = {cpu for rank in plan.ranks for cpu in set(rank.optimizer) & set(rank.pytorch)}
    body: list[str] = []
    y = MARGIN
    widest = 0
    for node in sorted({core.node for core in topology.cores}):
        cores = sorted(
            (core for core in topology.cores if core.node == node), key=lambda core: core.order
        )
        columns = min(CORES_PER_ROW, len(cores))
        tall = max(len(core.pus) for core in cores) * ROW + 4 + GAP
        rows = -(-len(cores) // CORES_PER_ROW)
        width, height = columns * (CELL + GAP) + GAP, rows * tall + 36
        widest = max(widest, width)
        body.append(_rect(MARGIN, y, width, height, "none", "#888"))
        body.append(_text(MARGIN + 8, y + 22, f"NUMA node {node}", anchor="start"))
        for index, core in enumerate(cores):
            x = MARGIN + GAP + (index % CORES_PER_ROW) * (CELL + GAP)
            body += _core_box(core, x, y + 32 + (index // CORES_PER_ROW) * tall, owner, shared)
        y += height + MARGIN
    legend = [*_legend(plan, y)]
    y += LINE * (len(plan.ranks) + 2)
    width = max(widest + 2 * MARGIN, 420)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" '
        f'height="{y:g}" font-family="sans-serif" font-size="{LETTERS}">'
    )
    return "\n".join([head, _rect(0, 0, width, y, "#fff", "none"), *body, *legend, "</svg>\n"])


def _core_box(
    core: Core, x: float, top: float, owner: dict[int, tuple[int, str]], shared: set[int]
) -> Iterator[str]:
    yield _rect(x, top, CELL, len(core.pus) * ROW + 4, "#f4f4f4", "#555")
    for row, cpu in enumerate(core.pus):
        rank, role = owner.get(cpu, (-1, ""))
        cell = top + 3 + row * ROW
        yield _rect(
            x + 2, cell, CELL - 4, ROW - 2, _colour(rank, role), "#f00" if cpu in shared else "none"
        )
        yield _text(x + CELL / 2, cell + 20, str(cpu), colour="#fff" if role == "pt" else "#222")


def _legend(plan: HostPlan, y: float) -> Iterator[str]:
    for row, rank in enumerate(plan.ranks):
        top = y + LINE * row
        yield _rect(MARGIN, top, 20, 20, _colour(rank.local_rank, "pt"), "none")
        yield _rect(MARGIN + 24, top, 20, 20, _colour(rank.local_rank, "opt"), "none")
        text = f"local rank {rank.local_rank}: PyTorch, optimizer {' '.join(rank.flags)}"
        yield _text(MARGIN + 54, top + 16, text.rstrip(), anchor="start")
    top = y + LINE * len(plan.ranks)
    yield _rect(MARGIN + 24, top, 20, 20, _colour(-1, ""), "#555")
    yield _text(MARGIN + 54, top + 16, "unused: idle, not allowed,", anchor="start")
    yield _text(MARGIN + 54, top + 38, "or second threads of optimizer cores", anchor="start")


def _colour(rank: int, role: str) -> str:
    if rank < 0:
        return "#e8e8e8"
    hue = HUES[rank % len(HUES)]
    return f"hsl({hue},65%,42%)" if role == "pt" else f"hsl({hue},75%,78%)"


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
