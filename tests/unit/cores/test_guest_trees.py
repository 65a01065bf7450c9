"""Plans of hosts as a real kernel shows them: their sysfs was read in the guests of
``python -m tests.guests.run``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from deepspeed.runtime.zenflow import zenflow_utils

from deepspeed_ext.commands import main as cli
from deepspeed_ext.runtime.proc import format_cpulist, parse_cpulist
from tests.guests import run
from tests.guests.hosts import GUESTS, Guest
from tests.guests.inside import upstream_split
from tests.support.paths import ROOT
from tests.support.sysfs import write

KEPT = ROOT / "tests/support/guest_trees"

PLANS = {
    "two-sockets": [("0-3", "4,6"), ("8-11", "12,14")],
    "four-nodes": [("8-9", "10-11"), ("0-1", "2-3"), ("4-5", "6-7")],
    "unplugged": [("0-2", "6"), ("8-9", "10")],
}
"""PyTorch's and the optimizer's CPUs of each rank, in the guests that have been run."""


def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((KEPT / f"{name}.json").read_text())
    return found


@pytest.fixture(
    params=[guest for guest in GUESTS if guest.name in PLANS], ids=lambda guest: guest.name
)
def guest(request: pytest.FixtureRequest) -> Guest:
    chosen: Guest = request.param
    return chosen


def test_the_tree_of_a_real_kernel_gives_the_plan_that_it_gave_there(
    guest: Guest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = kept(guest.name)
    for path, text in found["tree"].items():
        write(tmp_path / path, text.rstrip("\n"))
    assert cli.main(["plan", "--root", str(tmp_path), "--json", *guest.plan_arguments()]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    planned = [
        (format_cpulist(rank["pytorch"]), format_cpulist(rank["optimizer"])) for rank in ranks
    ]
    assert planned == PLANS[guest.name]
    assert planned == [(rank["pytorch"], rank["optimizer"]) for rank in found["ranks"]]
    assert cli.main(["plan", "--root", str(tmp_path), *guest.plan_arguments()]) == 0
    shown, then = (
        [line for line in text.splitlines() if line.startswith(("local", "  pytorch", "  optim"))]
        for text in (capsys.readouterr().out, found["plan"])
    )
    assert shown == then


def test_every_thread_was_where_the_plan_wanted_it(guest: Guest) -> None:
    assert run.show(kept(guest.name))
    wrong = kept(guest.name)
    wrong["ranks"][0]["kernel says of pytorch"][-1] = "0-15"
    assert not run.show(wrong)


@pytest.mark.parametrize(
    "masks", [["0-15", "0-15"], ["1-6,9,12-14"] * 2, ["0-7", "8-15"], ["8-15"] * 2]
)
def test_the_formula_beside_ours_is_deepspeeds_own(
    masks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = [sorted(parse_cpulist(mask)) for mask in masks]

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        for target, mask in zip(into, cpus, strict=True):
            target.copy_(torch.tensor(mask))

    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    for rank, expected in enumerate(upstream_split(cpus, 8)):
        group = SimpleNamespace(
            get_rank=lambda r=rank: r, get_world_size=lambda: len(cpus), all_gather=all_gather
        )
        process = SimpleNamespace(cpu_affinity=lambda r=rank: cpus[r])
        monkeypatch.setattr(zenflow_utils, "dist", group)
        monkeypatch.setattr(psutil, "Process", lambda p=process: p)
        optimizer, pytorch = zenflow_utils._compute_zf_pt_affinity(
            SimpleNamespace(pt_reserved_cores_perc=0.5)
        )
        assert (format_cpulist(pytorch), format_cpulist(optimizer)) == expected


def test_without_qemu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["run"])
    assert run.main() == run.EXIT_SKIPPED
    assert "SKIPPED: not installed: qemu-system-x86_64, busybox, depmod" in capsys.readouterr().out
