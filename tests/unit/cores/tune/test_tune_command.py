"""``deepspeed-ext tune`` on files, links, FIFOs and bad input, with invented measurements."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.cores import tuning_results
from deepspeed_ext.cores.tune.sweep import Point
from deepspeed_ext.cores.tune.tuner import Tuner, as_text
from deepspeed_ext.errors import ConfigError, WorkerError
from tests.support.log import heard
from tests.support.paths import ROOT


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What `tune` finds, without measuring; the cache and the working folder are the test's own."""
    splits = [{"pytorch_cores": 1, "optimizer_cores": 1, "step_seconds": 0.1, "slowdown": 0.0}]
    result = {
        "schema": tuning_results.SCHEMA,
        "key": "measured",
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
    monkeypatch.setenv("DSEXT_CACHE_DIR", str(tmp_path / "cache"))
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
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_disturbed_result_is_shown_and_kept_only_where_it_is_asked_for(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured |= {
        "noisy": True,
        "points": [asdict(Point(1, 1 / 9.0, 0.0, 9.0, "other processes used 70%"))],
    }
    assert tune() == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == measured
    assert "is not kept, because it was disturbed (other processes used 70%)" in printed.err
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert "finds this result by itself" not in as_text(measured, is_kept=False)
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
        self.report("optimizer on 1 core(s)")
        raise WorkerError("enough")

    monkeypatch.setattr(Tuner, "run", run)
    with heard("tune: measuring optimizer on 1 core(s)") as lines:
        assert tune("--output", str(tmp_path / "r.json")) == 1
    assert len(lines) == 1


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_folder_that_the_user_names_is_not_made(
    option: str, measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.iterdir())
    assert tune(option, "new/folder/r.png") == 2
    assert "there is no folder of this name" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "cache"}


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
    assert set(path.name for path in tmp_path.iterdir()) - set(before) <= {"cache"}


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


def test_a_cache_that_cannot_be_written_is_found_before_measuring(
    measured: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Tuner, "run", lambda self: pytest.fail("it measured"))
    (tmp_path / "cache").write_text("a file")
    assert tune() == 2
    assert str(tmp_path / "cache") in capsys.readouterr().err


def json_of(cores: str) -> bytes:
    return f'{{"schema": 1, "opt_cores_per_rank": {cores}}}'.encode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        json_of("1e999"),
        json_of("NaN"),
        json_of("9" * 400),
        json_of("9" * 5000),
        json_of("true"),
        json_of('"3"'),
        json_of("2.0"),
        json_of("3") + b" " * (64 << 10),
        b"[" * 100_000,
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"",
        None,
    ],
    ids=lambda content: "fifo" if content is None else content[-24:].decode(errors="replace"),
)
def test_a_tuning_file_that_is_none_is_ignored_with_one_warning(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tuning_results, "warn_once", heard.append)
    monkeypatch.setenv("DSEXT_CACHE_DIR", str(tmp_path))
    tuning_results.cached("good").write_bytes(
        tuning_results.as_bytes({"schema": 1, "opt_cores_per_rank": 3})
    )
    for name in ("tune-bad.json", "tune-worse.json"):
        os.mkfifo(tmp_path / name) if content is None else (tmp_path / name).write_bytes(content)
    assert tuning_results.load_all() == {"good": 3}
    assert len(heard) == 1
    assert "tune-bad.json" in heard[0]
    assert "tune-worse.json" in heard[0]


def test_without_a_home_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tuning_results, "warn_once", heard.append)
    monkeypatch.delenv("DSEXT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"deepspeed_ext-{os.getuid()}"
    planted.mkdir(mode=0o700)
    (planted / "tune-a.json").write_bytes(
        tuning_results.as_bytes({"schema": 1, "opt_cores_per_rank": 3})
    )
    assert tuning_results.load_all() == {}
    assert heard == []
    with pytest.raises(
        ConfigError,
        match="no home, so no cache for the result: set DSEXT_CACHE_DIR, or give --output",
    ):
        tuning_results.cached("a")


def made_writable(folder: Path) -> None:
    folder.chmod(0o777)


def made_group_writable(folder: Path) -> None:
    folder.chmod(0o770)


def given_away(folder: Path) -> None:
    os.chown(folder, 12345, 12345)


def made_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [made_writable, made_group_writable, given_away, made_a_link])
def test_a_cache_that_others_can_write_is_neither_read_nor_written(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is given_away and os.getuid() != 0:
        pytest.skip("only root gives folders away")
    heard: list[str] = []
    monkeypatch.setattr(tuning_results, "warn_once", heard.append)
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSEXT_CACHE_DIR", str(folder))
    stored = tuning_results.cached("a")
    assert folder.stat().st_mode & 0o777 == 0o700
    stored.write_bytes(tuning_results.as_bytes({"schema": 1, "opt_cores_per_rank": 3}))
    assert tuning_results.load_all() == {"a": 3}
    change(folder)
    assert tuning_results.load_all() == {}
    assert "may be another user's" in heard[0]
    with pytest.raises(ConfigError, match="may be another user's"):
        tuning_results.cached("a")


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
