"""Shows a core plan to people, as text or as a picture."""

from collections.abc import Iterator
from html import escape

from deepspeed_ext.cores.plan import HostPlan
from deepspeed_ext.cores.topology import Core, Topology
from deepspeed_ext.runtime.cpulist import format_cpulist

__all__ = ["plan_svg", "plan_text"]

CELL, GAP, MARGIN, CORES_PER_ROW = 34, 4, 16, 16
# One hue per rank; dark for PyTorch, light for the optimizer. Hues repeat after eight ranks.
HUES = (212, 28, 140, 340, 265, 52, 180, 0)


def plan_text(topology: Topology, plan: HostPlan) -> str:
    """Describe the plan in a few lines: the CPUs of each rank, and the reason."""
    threads = len(topology.cpus) / max(1, len(topology.cores))
    kinds = len({core.kind for core in topology.cores})
    lines = [
        f"{len(topology.cores)} cores, {len(topology.cpus)} CPUs ({threads:g} per core), "
        f"{len({core.node for core in topology.cores})} NUMA node(s) with cores, {kinds} kind(s) of core"
    ]
    for rank in plan.ranks:
        flags = f"  [{', '.join(rank.flags)}]" if rank.flags else ""
        lines.append(f"local rank {rank.local_rank} on node {rank.numa_node}{flags}")
        lines.append(f"  pytorch   {format_cpulist(rank.pytorch)} ({rank.pytorch_threads} threads)")
        if rank.optimizer:
            lines.append(f"  optimizer {format_cpulist(rank.optimizer)} ({len(rank.optimizer)} threads)")
        lines.append(f"  why       {rank.reason}")
    if plan.idle:
        lines.append(f"idle {format_cpulist(plan.idle)}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def plan_svg(topology: Topology, plan: HostPlan) -> str:
    """Draw the plan as SVG: a frame per NUMA node, a box per core, a cell per hardware thread."""
    owner = {cpu: (rank.local_rank, "opt") for rank in plan.ranks for cpu in rank.optimizer}
    owner |= {cpu: (rank.local_rank, "pt") for rank in plan.ranks for cpu in rank.pytorch if cpu not in owner}
    shared = {cpu for rank in plan.ranks for cpu in set(rank.optimizer) & set(rank.pytorch)}
    body: list[str] = []
    y = MARGIN
    widest = 0
    for node in sorted({core.node for core in topology.cores}):
        cores = sorted((core for core in topology.cores if core.node == node), key=lambda core: core.order)
        columns = min(CORES_PER_ROW, len(cores))
        tall = max(len(core.pus) for core in cores) * (CELL - 10) + GAP + 4
        rows = -(-len(cores) // CORES_PER_ROW)
        width, height = columns * (CELL + GAP) + 2 * GAP, rows * (tall + GAP) + 26
        widest = max(widest, width)
        body.append(_rect(MARGIN, y, width, height, "none", "#888"))
        body.append(_text(MARGIN + 8, y + 16, f"NUMA node {node}", anchor="start", size=13))
        for index, core in enumerate(cores):
            x = MARGIN + GAP + (index % CORES_PER_ROW) * (CELL + GAP) + GAP / 2
            top = y + 24 + (index // CORES_PER_ROW) * (tall + GAP)
            body += _core_box(core, x, top, owner, shared)
        y += height + MARGIN
    legend = [*_legend(plan, y)]
    y += 22 * (len(plan.ranks) + 1)
    width = max(widest + 2 * MARGIN, 420)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{y:g}" font-family="sans-serif">'
    return "\n".join([head, _rect(0, 0, width, y, "#fff", "none"), *body, *legend, "</svg>\n"])


def _core_box(core: Core, x: float, top: float, owner: dict[int, tuple[int, str]], shared: set[int]) -> Iterator[str]:
    height = len(core.pus) * (CELL - 10) + 4
    yield _rect(x, top, CELL, height, "#f4f4f4", "#555")
    for row, cpu in enumerate(core.pus):
        rank, role = owner.get(cpu, (-1, ""))
        cell_top = top + 2 + row * (CELL - 10)
        yield _rect(x + 2, cell_top, CELL - 4, CELL - 12, _colour(rank, role), "#f00" if cpu in shared else "none")
        yield _text(x + CELL / 2, cell_top + 15, str(cpu), colour="#fff" if role == "pt" else "#222")


def _legend(plan: HostPlan, y: float) -> Iterator[str]:
    for row, rank in enumerate(plan.ranks):
        top = y + 22 * row
        yield _rect(MARGIN, top, 16, 16, _colour(rank.local_rank, "pt"), "none")
        yield _rect(MARGIN + 20, top, 16, 16, _colour(rank.local_rank, "opt"), "none")
        text = f"local rank {rank.local_rank}: PyTorch, optimizer {' '.join(rank.flags)}"
        yield _text(MARGIN + 44, top + 13, text.rstrip(), anchor="start", size=13)
    top = y + 22 * len(plan.ranks)
    yield _rect(MARGIN + 10, top, 16, 16, _colour(-1, ""), "#555")
    text = "unused: idle, not allowed, or the second thread of an optimizer core"
    yield _text(MARGIN + 44, top + 13, text, anchor="start", size=13)


def _colour(rank: int, role: str) -> str:
    if rank < 0:
        return "#e8e8e8"
    hue = HUES[rank % len(HUES)]
    return f"hsl({hue},65%,42%)" if role == "pt" else f"hsl({hue},75%,78%)"


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11, colour: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
