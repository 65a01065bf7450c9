"""``deepspeed-ext plan`` as others see it: input, output, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.cores import plan as planner
from tests.support.sysfs import write, write_host
from tests.support.topologies import SPARSE, cores


def run(*arguments: str) -> int:
    """The command's exit status, whether it returns it or leaves through argparse."""
    try:
        return cli.main(["plan", *arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with a GPU each, whose tree the command reads."""
    monkeypatch.setattr(planner, "read_host", partial(planner.read_host, tmp_path))
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    write_host(tmp_path, cores(16, 16, 8))
    for address, node in (("0000:3b:00.0", "1"), ("0000:af:00.0", "0")):
        write(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", "Model: GPU")
        write(tmp_path / f"sys/bus/pci/devices/{address}/numa_node", node)
    return tmp_path


@pytest.mark.parametrize("arguments", [["--gpus", "0"], ["--gpus", "many"], ["--on"], ["extra"]])
def test_bad_input_is_status_2_and_one_line(
    arguments: list[str], host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepspeed-ext")
    assert printed.err.count("\n") == 1


def test_a_tree_that_describes_no_host_is_a_problem_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "read_host", partial(planner.read_host, tmp_path))
    assert run() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_gpus_there_is_one_rank_with_the_mask_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "read_host", partial(planner.read_host, tmp_path))
    write_host(tmp_path, cores(48), mask=SPARSE)
    assert run("--json", "--on-cpu") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["pytorch"] == [0, *range(4, 12), *range(21, 27), 30]
    assert rank["optimizer"] == list(range(31, 47))


@pytest.mark.parametrize("number", [None, 1, 3])
def test_each_gpu_has_a_rank_on_its_node_unless_their_number_is_given(
    number: int | None, host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json", *(["--gpus", str(number)] if number else [])) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"ranks", "idle", "warnings"}
    fields = {"local_rank", "pytorch", "optimizer", "numa_node", "flags"}
    assert all(set(rank) == fields for rank in printed["ranks"])
    assert [rank["local_rank"] for rank in printed["ranks"]] == list(range(number or 2))
    assert [rank["numa_node"] for rank in printed["ranks"]][:2] == [1, 0][:number]


def test_gpus_that_are_not_visible_have_no_ranks(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert run("--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["numa_node"] == 0


def test_text_names_ranks_cpus_and_reasons(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert "0-1,16-17" in text
    assert "10-15" in text
    assert text.count("why") == 2
    assert "has no cores" not in text
    assert text.count("few kept for PyTorch beside an accelerator") == 2


def test_plan_needs_neither_torch_nor_deepspeed_nor_pydantic() -> None:
    code = (
        "import sys; from deepspeed_ext.commands import main; "
        "status = main.main(sys.argv[1:]);"
        "heavy = ('torch', 'deepspeed', 'pydantic', 'psutil');"
        "sys.exit(status or any(name in sys.modules for name in heavy))"
    )
    command = [sys.executable, "-c", code, "plan"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_live_host_is_planned_within_the_mask_of_the_command() -> None:
    cpu = max(os.sched_getaffinity(0))
    command = [
        "taskset",
        "-c",
        str(cpu),
        sys.executable,
        "-m",
        "deepspeed_ext.commands.main",
        "plan",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (rank,) = json.loads(done.stdout)["ranks"]
    assert (rank["pytorch"], rank["optimizer"], rank["flags"]) == ([cpu], [cpu], ["shared"])
