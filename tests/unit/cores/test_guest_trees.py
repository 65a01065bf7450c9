"""Plans of hosts as a real kernel shows them: their sysfs was read in virtual machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_ext.cores.host import read_topology
from deepspeed_ext.cores.plan import RankFacts, plan_host, plan_text
from deepspeed_ext.runtime.proc import format_cpulist
from tests.support.paths import ROOT
from tests.support.sysfs import write

KEPT = ROOT / "tests/support/guest_trees"

PLANS = {
    "two-sockets": ((0, 1), [("0-3", "4,6"), ("8-11", "12,14")]),
    "four-nodes": ((3, 0, 1), [("8-9", "10-11"), ("0-1", "2-3"), ("4-5", "6-7")]),
    "unplugged": ((0, 1), [("0-2", "6"), ("8-9", "10")]),
}
"""The NUMA node of each rank's accelerator; PyTorch's and the optimizer's CPUs of each rank."""


@pytest.mark.parametrize("name", PLANS)
def test_the_tree_of_a_real_kernel_gives_the_plan_that_it_gave_there(
    name: str, tmp_path: Path
) -> None:
    nodes, expected = PLANS[name]
    found = json.loads((KEPT / f"{name}.json").read_text())
    for path, text in found["tree"].items():
        write(tmp_path / path, text.rstrip("\n"))
    topology = read_topology(tmp_path)
    ranks = [RankFacts(rank, topology.cpus, node) for rank, node in enumerate(nodes)]
    plan = plan_host(topology, ranks)
    assert expected == [
        (format_cpulist(rank.pytorch), format_cpulist(rank.optimizer)) for rank in plan.ranks
    ]
    shown, then = (
        [line for line in text.splitlines() if line.startswith(("local", "  pytorch", "  optim"))]
        for text in (plan_text(topology, plan), found["plan"])
    )
    assert shown == then
