"""The tuner: its choices on invented machines, and one real, short run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.affinity import tuning_results
from deepspeed_ext.affinity.host_facts import read_host
from deepspeed_ext.affinity.plan import RankFacts
from deepspeed_ext.affinity.topology import Topology, read_cache_bytes
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.errors import OutOfMemoryError, WorkerError
from deepspeed_ext.tuning import measuring_process, processes, tuner
from deepspeed_ext.tuning.measuring_process import Steps
from deepspeed_ext.tuning.processes import ForeignLoad, MeasuringProcesses
from deepspeed_ext.tuning.sweep import Point, Sweep, choose, ladder, relative_spread, training_choice
from deepspeed_ext.tuning.tuner import Tuner, TuneSettings
from deepspeed_ext.zenflow.kernel import load_kernel
from tests.support.paths import ROOT
from tests.support.sysfs import write_host
from tests.support.topologies import cores

CPUS = sorted(os.sched_getaffinity(0))


def point(number: int, gb_per_s: float, noise: str = "") -> Point:
    return Point(number, 1 / gb_per_s if gb_per_s else float("inf"), 0.0, gb_per_s, noise)


@given(
    maximum=st.integers(1, 200),
    per_core=st.floats(1, 30),
    limit=st.floats(10, 500),
    decline=st.floats(0, 0.002),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_choice_is_within_5_percent_of_the_exhaustive_best(
    maximum: int, per_core: float, limit: float, decline: float
) -> None:
    """Bandwidth that grows up to a limit and then may fall a little, as on real sockets."""

    def bandwidth(number: int) -> float:
        return min(per_core * number, limit) * (1 - decline * number)

    measured: list[int] = []

    def measure(number: int) -> Point:
        measured.append(number)
        return point(number, bandwidth(number))

    points = Sweep(maximum, measure).run()
    chosen = choose(points)
    exhaustive = [bandwidth(number) for number in range(1, maximum + 1)]
    assert bandwidth(chosen) >= 0.95 * max(exhaustive)
    # And no smaller number would have done, among all that exist.
    assert chosen == 1 or bandwidth(chosen - 1) < 0.97 * max(candidate.gb_per_s for candidate in points)
    assert len(set(measured)) <= 2 * len(ladder(maximum)) + 2


@pytest.mark.parametrize(
    ("maximum", "steps"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (32, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]), (7, [1, 2, 3, 4, 6, 7])],
)
def test_ladder(maximum: int, steps: list[int]) -> None:
    assert ladder(maximum) == steps


def test_climb_ends_when_two_more_steps_gain_nothing() -> None:
    points = Sweep(64, lambda number: point(number, min(number, 4) * 10.0)).run()
    assert [candidate.cores for candidate in points] == [1, 2, 3, 4, 5, 6, 8]


def test_a_failed_point_does_not_end_the_sweep() -> None:
    points = Sweep(6, lambda number: point(number, 0.0 if number == 2 else 10.0 * number)).run()
    assert choose(points) == 6
    assert [candidate.cores for candidate in points] == [1, 2, 3, 4, 5, 6]


def test_a_second_look_replaces_a_disturbed_measurement() -> None:
    seen: list[int] = []

    def measure(number: int) -> Point:
        seen.append(number)
        return point(number, 5.0 if seen.count(number) == 1 and number == 3 else 10.0 * number)

    points = Sweep(3, measure).run()
    assert [candidate.gb_per_s for candidate in points] == [10.0, 20.0, 30.0]


def test_time_that_the_accelerator_gives_needs_fewer_cores() -> None:
    points = [point(number, 10.0 * number) for number in (1, 2, 3, 4)]
    assert choose(points) == 4
    assert choose(points, hidden_seconds=1 / 20) == 2
    assert choose(points, hidden_seconds=1e-9) == 4


def test_pytorch_gets_more_cores_only_where_that_helps() -> None:
    assert training_choice({8: 0.10, 6: 0.09}) == 8
    assert training_choice({8: 0.10, 6: 0.02, 4: 0.01}) == 6
    assert training_choice({8: 0.0}) == 8


def test_relative_spread() -> None:
    assert relative_spread([1.0, 1.0, 1.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_fingerprint_names_exactly_one_situation() -> None:
    topology = Topology(tuple(cores(8)))
    ranks = [RankFacts(rank, frozenset(range(8))) for rank in range(2)]
    keys = {
        tuning_results.Fingerprint.of(topology, ranks).key,
        tuning_results.Fingerprint.of(topology, ranks[:1]).key,
        tuning_results.Fingerprint.of(topology, ranks, kernel="other").key,
        tuning_results.Fingerprint.of(topology, [ranks[0], RankFacts(1, frozenset({1}))]).key,
        tuning_results.Fingerprint.of(topology, [ranks[0], RankFacts(1, frozenset(range(8)), 0)]).key,
        tuning_results.Fingerprint.of(Topology(tuple(cores(9))), ranks).key,
    }
    assert len(keys) == 6
    assert tuning_results.Fingerprint.of(topology, ranks).key in keys


def test_results_are_found_in_the_cache_and_broken_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_results.load_all() == {}
    tuning_results.save("good", {"schema": 1, "opt_cores_per_rank": 3})
    tuning_results.save("old", {"schema": 0, "opt_cores_per_rank": 3})
    tuning_results.save("none", {"schema": 1, "opt_cores_per_rank": 0})
    (tuning_results.cache_folder() / "tune-broken.json").write_text("{")
    assert tuning_results.load_all() == {"good": 3}
    assert sorted(path.name for path in tuning_results.cache_folder().iterdir())[-1] == "tune-old.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning_results.cache_folder() == Path.home() / ".cache/deepspeed_ext"


def test_cache_bytes_count_each_last_level_cache_once(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8, 8, 4))
    assert read_cache_bytes(tmp_path) == 2 * (32 << 20)


def test_a_failing_worker_is_one_failed_point() -> None:
    settings = TuneSettings(elements=1 << 40)
    with Tuner(read_host("/"), settings) as tuner:
        failed = tuner.measure(1)
        assert failed.gb_per_s == 0.0
        assert "status" in failed.noise
        with pytest.raises(WorkerError, match="no number of cores"):
            tuner.run()


def test_buffers_take_a_quarter_of_what_is_left_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "available_host_bytes", lambda: 2 << 20)
    assert TuneSettings.for_host(2, quick=True).elements == (2 << 20) // 4 // (2 * tuner.STATE_BYTES_PER_ELEMENT)
    monkeypatch.setattr(tuner, "available_host_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match="free host memory"):
        TuneSettings.for_host(2, quick=True)


def test_foreign_load_is_noticed() -> None:
    quiet = ForeignLoad({CPUS[0]})
    code = "import time; end = time.time() + 1.0\nwhile time.time() < end: pass"
    with subprocess.Popen(["taskset", "-c", str(CPUS[0]), sys.executable, "-c", code]) as other:
        quiet.begin([])
        other.wait()
        assert "other processes" in quiet.verdict()


def test_load_is_that_of_the_cpus_of_these_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU 1 is offline, so the second line of the kernel's table is that of CPU 2."""
    Times = namedtuple("Times", ["user", "idle", "iowait"])
    table = [Times(busy, 1000.0, 100.0) for busy in (1.0, 20.0, 300.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: table)
    monkeypatch.setattr(processes, "read_online", lambda: frozenset({0, 2, 3}))
    assert [ForeignLoad(cpus)._busy() for cpus in ({0}, {2}, {3}, {2, 3}, {1})] == [1.0, 20.0, 300.0, 320.0, 0.0]


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "json", "queue", "torch", "signal", "psutil", "deepspeed"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the folder')")
    monkeypatch.chdir(tmp_path)
    with MeasuringProcesses("training", [WorkerPlacement(frozenset(CPUS[:1]))], 0) as processes:
        assert len(processes.pids) == 1


def test_crew_runs_on_its_cores_and_leaves_nobody_behind() -> None:
    place = WorkerPlacement(frozenset(CPUS[:1]))
    with MeasuringProcesses("optimizer:torch-fused-adamw", [place, place], 1 << 16) as processes:
        answers = processes.ask(Steps(3))
        pids = processes.pids
        masks = [os.sched_getaffinity(pid) for pid in pids]
    assert [len(seconds) for seconds in answers] == [3, 3]
    assert masks == [set(CPUS[:1])] * 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_quick_run_writes_a_result_that_training_finds(tmp_path: Path) -> None:
    picture = tmp_path / "tune.png"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    command = [sys.executable, "-m", "deepspeed_ext.cli", "tune", "--quick", "--json", "--elements", str(1 << 20)]
    command += ["--ranks", "1", "--plot", str(picture)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    host = read_host("/", [",".join(map(str, CPUS))])
    key = tuning_results.Fingerprint.of(host.topology, host.ranks).key
    folder = tmp_path / "deepspeed_ext"
    assert json.loads((folder / f"tune-{key}.json").read_text()) == result
    assert 1 <= result["opt_cores_per_rank"] <= max(1, len(CPUS) - 1)
    records = [json.loads(line) for line in (folder / f"tune-{key}.jsonl").read_text().splitlines()]
    assert {record["optimizer_cores"] for record in records} == {number["cores"] for number in result["points"]}
    assert result["training"]["splits"][0]["step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


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
        "points": [asdict(point(1, 9.0))],
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
    from deepspeed_ext import cli

    return cli.main(["tune", "--ranks", "1", "--json", *arguments])


def test_the_result_of_a_jsonl_file_is_not_lost_to_its_records(measured: dict[str, Any], tmp_path: Path) -> None:
    assert tune("--output", "new/r.jsonl") == 0
    assert json.loads((tmp_path / "new/r.jsonl").read_text()) == measured
    assert json.loads((tmp_path / "new/r.records.jsonl").read_text()) == {"optimizer_cores": 1}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["r.jsonl", "r.records.jsonl"]
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("was_there", [True, False])
def test_a_link_to_the_result_stays_a_link(was_there: bool, measured: dict[str, Any], tmp_path: Path) -> None:
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
def test_a_fifo_is_written_to_and_stays(option: str, through: str, measured: dict[str, Any], tmp_path: Path) -> None:
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
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    tuning_results.save("good", {"schema": 1, "opt_cores_per_rank": 3})
    for name in ("tune-bad.json", "tune-worse.json"):
        os.mkfifo(tmp_path / name) if content is None else (tmp_path / name).write_bytes(content)
    assert tuning_results.load_all() == {"good": 3}
    assert len(heard) == 1
    assert "tune-bad.json" in heard[0]
    assert "tune-worse.json" in heard[0]


def test_without_a_home_there_are_no_tuning_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tuning_results, "warn_once", heard.append)
    monkeypatch.delenv("DSEXT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tuning_results.load_all() == {}
    assert heard == []


def test_the_kernel_that_is_measured_is_made_once_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference kernel's pool is what is measured if there is no compiler; other numbers of threads are too."""
    made: list[int] = []

    def load(library: str | None, threads: int) -> Any:
        made.append(threads)
        return load_kernel(library, threads)

    monkeypatch.setattr("deepspeed_ext.zenflow.kernel.library_path", lambda: None)
    monkeypatch.setattr("deepspeed_ext.zenflow.kernel.load_kernel", load)
    threads = torch.get_num_threads()
    try:
        worker = measuring_process._Worker(lambda: measuring_process.adam_pass_step(1 << 12), 2)
        worker.steps(Steps(3))
        worker.move(measuring_process.Move(frozenset(os.sched_getaffinity(0)), 3, reallocate=False))
        worker.steps(Steps(3))
    finally:
        torch.set_num_threads(threads)
    assert made == [2, 3]


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
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_ext import cli

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
    from deepspeed_ext import cli

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["tune", "--plot", "x.png"]) == 2
    assert "pip install" in capsys.readouterr().err
