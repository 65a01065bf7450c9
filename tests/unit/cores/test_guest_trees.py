"""Plans of hosts as a real kernel shows them: their sysfs was read in virtual machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_ext.commands import main as cli
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
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, plan = PLANS[name]
    arguments = ["plan", "--root", str(tmp_path)]
    arguments += [word for node in nodes for word in ("--gpu-node", str(node))]
    found = json.loads((KEPT / f"{name}.json").read_text())
    for path, text in found["tree"].items():
        write(tmp_path / path, text.rstrip("\n"))
    assert cli.main([*arguments, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert plan == [
        (format_cpulist(rank["pytorch"]), format_cpulist(rank["optimizer"])) for rank in ranks
    ]
    assert cli.main(arguments) == 0
    shown, then = (
        [line for line in text.splitlines() if line.startswith(("local", "  pytorch", "  optim"))]
        for text in (capsys.readouterr().out, found["plan"])
    )
    assert shown == then
