"""``deepspeed-ext tune`` on files, links, FIFOs and bad input, with invented measurements."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.config import ZeroFields
from deepspeed_ext.cores.tune.sweep import Point
from deepspeed_ext.cores.tune.tuner import Tuner, as_text
from deepspeed_ext.errors import WorkerError
from tests.support.log import heard
from tests.support.paths import ROOT


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What `tune` finds, without measuring; the working folder is the test's own."""
    splits = [{"pytorch_cores": 1, "optimizer_cores": 1, "step_seconds": 0.1, "slowdown": 0.0}]
    result = {
        "ranks": 1,
        "elements": 9,
        "opt_cores_per_rank": 1,
        "pt_cores_per_rank": 1,
        "saturated": True,
        "noisy": False,
        "points": [asdict(Point(1, 1 / 9.0, 0.0, 9.0))],
        "training": {"alone_seconds": 0.1, "splits": splits},
    }

    def run_without_measuring(self: Tuner) -> dict[str, Any]:
        self.records.append({"optimizer_cores": 1})
        return result

    monkeypatch.setattr(Tuner, "run", run_without_measuring)
    monkeypatch.chdir(tmp_path)
    return result


def tune(*arguments: str) -> int:
    from deepspeed_ext.commands import main as cli

    return cli.main(["tune", "--ranks", "1", "--json", *arguments])


def test_the_result_of_a_jsonl_file_is_not_lost_to_its_records(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    assert tune("--output", "new/r.jsonl") == 0
    assert json.loads((tmp_path / "new/r.jsonl").read_text()) == measured
    assert json.loads((tmp_path / "new/r.records.jsonl").read_text()) == {"optimizer_cores": 1}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "r.jsonl",
        "r.records.jsonl",
    ]


def test_a_disturbed_result_is_shown_without_a_config_line_and_kept_if_asked_for(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured |= {
        "noisy": True,
        "points": [asdict(Point(1, 1 / 9.0, 0.0, 9.0, "other processes used 70%"))],
    }
    assert tune() == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == measured
    assert "the measurement was disturbed (other processes used 70%)" in printed.err
    assert "pt_reserved_cores" not in as_text(measured)
    failed = asdict(Point(2, None, 0.0, 0.0, "ended with status 1"))
    assert "    2           0.0      failed" in as_text({**measured, "points": [failed]})
    assert tune("--output", "mine.json") == 0
    assert json.loads((tmp_path / "mine.json").read_text()) == measured


def test_more_ranks_than_pairs_of_cores_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from deepspeed_ext.commands import main as cli

    assert cli.main(["tune", "--ranks", "500"]) == 2
    assert (
        "a rank needs two, one for PyTorch and one for the optimizer: give at most"
        in capsys.readouterr().err
    )


def test_each_measurement_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A log line each, because a run without a terminal shows no bar."""

    def run(self: Tuner) -> dict[str, Any]:
        self.report("optimizer on 1 core")
        raise WorkerError("enough")

    monkeypatch.setattr(Tuner, "run", run)
    with heard("tune: measuring optimizer on 1 core") as lines:
        assert tune("--output", str(tmp_path / "r.json")) == 1
    assert len(lines) == 1


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_folder_that_the_user_names_is_not_made(
    option: str, measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.iterdir())
    assert tune(option, "new/folder/r.png") == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("was_there", [True, False])
def test_a_link_to_the_result_stays_a_link(
    was_there: bool, measured: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder/real.json", tmp_path / "link.json"
    if was_there:
        real.write_text("old")
        real.chmod(0o640)
    link.symlink_to(real)
    assert tune("--output", str(link)) == 0
    assert link.is_symlink()
    assert json.loads(real.read_text()) == measured
    assert (tmp_path / "folder/real.jsonl").exists()
    assert not was_there or stat.S_IMODE(real.stat().st_mode) == 0o640


@pytest.mark.parametrize("through", ["itself", "link"])
@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_fifo_is_written_to_and_stays(
    option: str, through: str, measured: dict[str, Any], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    name = fifo
    if through == "link":
        name = tmp_path / "link"
        name.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert tune(option, str(name)) == 0
    content = os.read(reader, 1 << 20)
    os.close(reader)
    assert fifo.is_fifo()
    assert content.startswith(b"\x89PNG") if option == "--plot" else json.loads(content) == measured
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.timeout(60)
def test_a_fifo_that_nobody_reads_costs_an_error_and_not_the_result(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert tune("--output", "fifo") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == measured
    assert printed.err.count("\n") == 1


def test_a_device_is_written_to_and_stays(measured: dict[str, Any], tmp_path: Path) -> None:
    """A node of our own: the mistake that this looks for replaces it."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"device nodes cannot be made here: {error}")
    assert tune("--output", str(device)) == 0
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("null")] == ["null"]


def test_a_picture_never_replaces_the_result(measured: dict[str, Any], tmp_path: Path) -> None:
    assert tune("--output", "a.png", "--plot", "a.png") == 2
    assert tune("--output", "a.json", "--plot", "sub/../a.json") == 2
    assert not list(tmp_path.glob("a.*"))


def test_the_result_ends_with_a_line_for_the_config(measured: dict[str, Any]) -> None:
    line = as_text(measured).splitlines()[-1]
    section = json.loads("{" + line + "}")
    zenflow = ZeroFields(**section).zenflow
    assert zenflow is not None
    assert zenflow.pt_reserved_cores == measured["pt_cores_per_rank"]


def test_a_plan_depends_on_no_file_that_tune_may_have_left(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed_ext.commands import main as cli

    def planned() -> str:
        assert cli.main(["plan", "--json"]) == 0
        return capsys.readouterr().out

    before = planned()
    assert tune() == 0
    capsys.readouterr()
    assert planned() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu-step-ms", "5"], "--elements"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "1025"], "1 to 1024"),
        (["--ranks", "12345678901"], "1 to 1024"),
        (["--ranks", "9" * 5000], "1 to 1024"),
        (["--ranks", "٣"], "1 to 1024"),
        (["--elements", "9" * 20], "--elements"),
        (["--update-interval", "9" * 400], "--update-interval"),
        (["--gpu-step-ms", "nan", "--elements", "9"], "milliseconds above 0"),
        (["--gpu-step-ms", "inf", "--elements", "9"], "milliseconds above 0"),
        (["--gpu-step-ms", "-5", "--elements", "9"], "milliseconds above 0"),
        (["--gpu-step-ms", "1e300", "--elements", "9"], "milliseconds above 0"),
        (["--gpu-step-ms", "fast", "--elements", "9"], "milliseconds above 0"),
        (["--gpu-node", "9" * 5000], "--gpu-node"),
        (["--allowed", "x"], "not a CPU number"),
        (["--output", ""], "--output"),
        (["--output", "x\0y"], "--output"),
        (["--output", "n" * 300], "--output"),
        (["--output", "pyproject.toml/x"], "--output"),
        (["--output", "tests"], "--output"),
        (["--plot", "x.banana"], "not supported"),
        (["--plot", "tests/unit"], "--plot"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed_ext.commands import main as cli

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Tuner, "run", lambda self: pytest.fail("it measured"))
    try:
        status = cli.main(["tune", *arguments])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    assert status == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert len(printed) < 1000


def test_plot_without_matplotlib_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_ext.commands import main as cli

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["tune", "--plot", "x.png"]) == 2
    assert "pip install" in capsys.readouterr().err
