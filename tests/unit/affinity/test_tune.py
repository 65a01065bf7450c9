"""The tuner: its choices on invented machines, and one real, short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.affinity import tuned
from deepspeed_ext.affinity.crew import Crew, Quiet
from deepspeed_ext.affinity.host import read_host
from deepspeed_ext.affinity.plan import RankFacts
from deepspeed_ext.affinity.plot import plot_result
from deepspeed_ext.affinity.sweep import Point, Sweep, choose, ladder, relative_spread, training_choice
from deepspeed_ext.affinity.topology import Topology, read_cache_bytes
from deepspeed_ext.affinity.tune import Tuner, TuneSettings
from deepspeed_ext.affinity.tune_worker import Steps
from deepspeed_ext.affinity.worker import WorkerPlace
from tests.support.sysfs import write_host
from tests.unit.affinity.topologies import cores

ROOT = Path(__file__).resolve().parents[3]
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
        tuned.Fingerprint.of(topology, ranks).key,
        tuned.Fingerprint.of(topology, ranks[:1]).key,
        tuned.Fingerprint.of(topology, ranks, kernel="other").key,
        tuned.Fingerprint.of(topology, [ranks[0], RankFacts(1, frozenset({1}))]).key,
        tuned.Fingerprint.of(topology, [ranks[0], RankFacts(1, frozenset(range(8)), 0)]).key,
        tuned.Fingerprint.of(Topology(tuple(cores(9))), ranks).key,
    }
    assert len(keys) == 6
    assert tuned.Fingerprint.of(topology, ranks).key in keys


def test_results_are_found_in_the_cache_and_broken_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.load_all() == {}
    tuned.save("good", {"schema": 1, "opt_cores_per_rank": 3})
    tuned.save("old", {"schema": 0, "opt_cores_per_rank": 3})
    tuned.save("none", {"schema": 1, "opt_cores_per_rank": 0})
    (tuned.cache_folder() / "tune-broken.json").write_text("{")
    assert tuned.load_all() == {"good": 3}
    assert sorted(path.name for path in tuned.cache_folder().iterdir())[-1] == "tune-old.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuned.cache_folder() == Path.home() / ".cache/deepspeed_ext"


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


def test_foreign_load_is_noticed() -> None:
    quiet = Quiet({CPUS[0]})
    code = "import time; end = time.time() + 1.0\nwhile time.time() < end: pass"
    with subprocess.Popen(["taskset", "-c", str(CPUS[0]), sys.executable, "-c", code]) as other:
        quiet.begin([])
        other.wait()
        assert "other processes" in quiet.verdict()


def test_crew_runs_on_its_cores_and_leaves_nobody_behind() -> None:
    place = WorkerPlace(frozenset(CPUS[:1]))
    with Crew("optimizer:torch-fused-adamw", [place, place], 1 << 16) as crew:
        answers = crew.ask(Steps(3))
        pids = crew.pids
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
    key = tuned.Fingerprint.of(host.topology, host.ranks).key
    folder = tmp_path / "deepspeed_ext"
    assert json.loads((folder / f"tune-{key}.json").read_text()) == result
    assert 1 <= result["opt_cores_per_rank"] <= max(1, len(CPUS) - 1)
    records = [json.loads(line) for line in (folder / f"tune-{key}.jsonl").read_text().splitlines()]
    assert {record["optimizer_cores"] for record in records} == {number["cores"] for number in result["points"]}
    assert result["training"]["splits"][0]["step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_refuses_an_unknown_format(tmp_path: Path) -> None:
    split = {"pytorch_cores": 1, "optimizer_cores": 1, "step_seconds": 0.1, "slowdown": 0.0}
    result = {
        "ranks": 1,
        "opt_cores_per_rank": 1,
        "points": [{"cores": 1, "gb_per_s": 9.0, "spread": 0.1, "noise": ""}],
        "training": {"alone_seconds": 0.1, "splits": [split]},
    }
    with pytest.raises(ValueError, match="not supported"):
        plot_result(result, str(tmp_path / "x.banana"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu-step-ms", "5"], "--elements"),
        (["--ranks", "0"], "at least 1"),
        (["--allowed", "x"], "not a CPU number"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed_ext import cli

    try:
        status = cli.main(["tune", *arguments])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    assert status == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_plot_without_matplotlib_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_ext import cli

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["tune", "--plot", "x.png"]) == 2
    assert "pip install" in capsys.readouterr().err
