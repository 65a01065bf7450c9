"""``deepspeed-ext plan`` as others see it: input, output, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.commands import main as cli
from tests.support.sysfs import write_host
from tests.support.topologies import SPARSE, adjacent, cores


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return write_host(tmp_path, cores(16, 16, 8))


def run(root: Path, *arguments: str) -> int:
    """The command's exit status, whether it returns it or leaves through argparse."""
    try:
        return cli.main(["plan", "--root", str(root), *arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--allowed", "banana"],
        ["--allowed", "100-110"],
        ["--allowed", "0-3", "--allowed", "4-7", "--gpu-node", "0"],
        ["--gpu-node", "9"],
        ["--pt-reserved-cores", "0"],
        ["--pt-reserved-cores", "1.0"],
        ["--pt-reserved-cores", "nan"],
        ["--pt-reserved-cores", "many"],
        ["--optimizer-cores", "0"],
        ["--optimizer-cores", "2.5"],
        ["--opt", "2"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_bad_input_is_status_2_and_one_line(
    arguments: list[str], host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(host, "--json", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepspeed-ext")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("root", ["missing", "empty", "file"])
def test_a_root_that_describes_no_host_is_status_2(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert run(tmp_path / root) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_lists_there_is_one_rank_with_the_mask_of_the_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_host(tmp_path, cores(48), mask=SPARSE)
    assert run(tmp_path, "--json", "--on-cpu") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["pytorch"] == [0, *range(4, 12), *range(21, 27), 30]
    assert rank["optimizer"] == list(range(31, 47))


def test_gpu_nodes_alone_say_how_many_ranks(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(host, "--json", "--gpu-node", "1", "--gpu-node", "-1", "--gpu-node", "none") == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["local_rank"] for rank in ranks] == [0, 1, 2]
    assert ranks[0]["numa_node"] == 1


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (["--pt-reserved-cores", "0.25"], (8, 12, 0)),
        (["--optimizer-cores", "3", "--pt-reserved-cores", "4"], (8, 3, 18)),
        (["--on-cpu", "--optimizer-cores", "3"], (26, 3, 0)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_requests_are_counts_of_cores(
    arguments: list[str],
    counts: tuple[int, int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_host(tmp_path, adjacent(16, 2))
    assert run(tmp_path, "--json", *arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    (rank,) = printed["ranks"]
    assert (len(rank["pytorch"]), len(rank["optimizer"]), len(printed["idle"])) == counts


def test_text_names_ranks_cpus_and_reasons(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(host, "--gpu-node", "0", "--gpu-node", "1") == 0
    text = capsys.readouterr().out
    assert "0-1,16-17" in text
    assert "10-15" in text
    assert text.count("why") == 2
    assert text.count("few kept for PyTorch beside an accelerator") == 2


def test_plan_needs_neither_torch_nor_deepspeed_nor_pydantic(host: Path) -> None:
    code = (
        "import sys; from deepspeed_ext.commands import main; "
        "status = main.main(sys.argv[1:]);"
        "heavy = ('torch', 'deepspeed', 'pydantic', 'psutil');"
        "sys.exit(status or any(name in sys.modules for name in heavy))"
    )
    command = [sys.executable, "-c", code, "plan", "--root", str(host)]
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
