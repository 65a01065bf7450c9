"""The picture of a plan: each thread is in the box of its core, in the frame of its node, and has
the colour of its role."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from deepspeed_ext.cores.plan import RankFacts, plan_host
from deepspeed_ext.cores.report import plan_svg
from deepspeed_ext.cores.topology import Core, Topology
from tests.support.topologies import HYBRID, cores


class Box(NamedTuple):
    """A rectangle of a picture."""

    left: float
    top: float
    right: float
    bottom: float
    fill: str
    stroke: str

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left < other.right <= self.right
            and self.top <= other.top < other.bottom <= self.bottom
        )


def are_apart(boxes: Sequence[Box]) -> bool:
    return all(
        one.right <= other.left
        or other.right <= one.left
        or one.bottom <= other.top
        or other.bottom <= one.top
        for one, other in itertools.combinations(boxes, 2)
    )


def drawn(picture: str) -> list[Box | str]:
    """Its rectangles and texts, in the order in which they are drawn."""
    found: list[Box | str] = []
    for element in ElementTree.fromstring(picture):
        if element.tag.endswith("text"):
            found.append(element.text or "")
            continue
        x, y, width, height = (
            float(element.attrib[name]) for name in ("x", "y", "width", "height")
        )
        colours = element.attrib["fill"], element.attrib["stroke"]
        found.append(Box(x, y, x + width, y + height, *colours))
    return found


@pytest.mark.parametrize(
    ("host", "ranks"),
    [
        (tuple(cores(22, sibling_step=22, per_node=11)), 2),
        (tuple(cores(16, per_node=8)), 3),
        (HYBRID, 1),
        (tuple(cores(1, sibling_step=1)), 2),
    ],
)
def test_each_thread_is_in_its_core_and_node_and_has_the_colour_of_its_role(
    host: tuple[Core, ...], ranks: int
) -> None:
    nodes = tuple(sorted({core.node for core in host}))
    topology = Topology(host, nodes, tuple(tuple(10 for _ in nodes) for _ in nodes))
    plan = plan_host(topology, [RankFacts(rank, topology.cpus) for rank in range(ranks)])
    page, *parts = drawn(plan_svg(topology, plan))
    legend = parts[-(3 * ranks + 3) :]  # two squares and a text for each rank; a square, two lines
    squares = [part for part in legend if isinstance(part, Box)]
    frames: dict[str, Box] = {}
    boxes: dict[str, list[Box]] = {}
    cells: dict[int, Box] = {}
    node = ""
    for part, following in itertools.pairwise(parts[: -len(legend)]):
        if isinstance(part, str):
            continue
        if isinstance(following, Box):  # a core, before its threads
            boxes[node].append(part)
            assert frames[node].holds(part)
        elif following.startswith("NUMA node"):
            node = following
            frames[node], boxes[node] = part, []
        else:
            cells[int(following)] = part
            (core,) = (core for core in host if int(following) in core.pus)
            assert node == f"NUMA node {core.node}"
            assert boxes[node][-1].holds(part)
    assert cells.keys() == topology.cpus
    assert all(
        map(are_apart, [*boxes.values(), list(cells.values()), [*frames.values(), *squares]])
    )
    assert isinstance(page, Box)
    assert all(map(page.holds, [*frames.values(), *squares]))
    expected = dict.fromkeys(topology.cpus, squares[-1].fill)
    for rank, training, stepping in zip(plan.ranks, squares[:-1:2], squares[1::2], strict=True):
        expected |= dict.fromkeys(rank.pytorch, training.fill)
        expected |= dict.fromkeys(rank.optimizer, stepping.fill)
        for cpu in {*rank.pytorch, *rank.optimizer}:
            is_shared = cpu in rank.pytorch and cpu in rank.optimizer
            assert (cells[cpu].stroke == "#f00") is is_shared
    assert {cpu: cell.fill for cpu, cell in cells.items()} == expected
    assert len({square.fill for square in squares}) == len(squares)
