"""The study of core binding does what its labels say: who is bound, how, and what is divided by
what."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.perf import bench_binding, threads
from tests.perf.bench_binding import compare, figures, places, require_within, tasks, ways_of
from tests.perf.binding_teams import Team, TeamError, command, environment
from tests.perf.binding_ways import (
    LADDER,
    OURS,
    STUDY,
    TASKSET,
    UNBOUND,
    ZENFLOW_STUDY,
    Facts,
    Place,
    Task,
    Turn,
    Way,
)
from tests.perf.threads import Counts

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
BY_NAME = {way.name: way for way in (*ZENFLOW_STUDY, *LADDER)}
TOY = {"device": "cpu", "millions": 0.1, "elements": 1 << 16, "warm_up": 2}


def toy_args(*words: str) -> argparse.Namespace:
    toy = ["--millions", "0.5", "--rounds", "1", "--steps", "4", "--elements", "65536", *words]
    return bench_binding.arguments().parse_args(toy)


# -- real processes --------------------------------------------------------------------------------


def facts_of(way: Way) -> tuple[Facts, Turn, Place]:
    """Of a process that trains without an engine, on one of this machine's plans."""
    place = places(1, "cpu")[0]
    with contextlib.closing(Team.start([Task("", "", way, "training", (place,), **TOY)])) as team:
        assert not team._log_end()
        return team.facts["training", 0], team.turn(3, 0.0)["training", 0], place


@needs_two_cpus
def test_upstreams_call_leaves_threads_behind_and_the_whole_pool() -> None:
    facts, turn, place = facts_of(BY_NAME["main thread (upstream's call)"])
    assert facts.threads[place.training] == 1, "the main thread alone is moved"
    assert sum(facts.threads.values()) > 1
    assert facts.pool > place.training_cores
    assert turn.seconds > 0
    assert turn.involuntary >= 0


@pytest.mark.sampled(2)
@needs_two_cpus
@pytest.mark.parametrize("name", ["all threads, pool resized", TASKSET.name])
def test_the_last_steps_of_the_ladder_bind_every_thread(name: str) -> None:
    facts, _, place = facts_of(BY_NAME[name])
    assert list(facts.threads) == [place.training]
    assert facts.pool == place.training_cores


@pytest.mark.full
@needs_two_cpus
@pytest.mark.parametrize("part", ["offload", "upstream", "ours"])
def test_a_table_of_engines(part: str) -> None:
    args = toy_args("--ways", UNBOUND.name, "upstream, in code", OURS.name)
    rows = bench_binding.measure(part, 1, args, None)
    assert [row["way"] for row in rows] == [
        "plain ZeRO, taskset",
        "unbound",
        "upstream, in code",
        "ours, all threads",
    ]
    for row in rows:
        assert row["step ms"]["median"] > 0
        assert row["practicality"] == pytest.approx(
            rows[0]["step ms"]["median"] / row["step ms"]["median"]
        )
        assert ("worker" in row["threads"]) == (part != "offload" and row is not rows[0])
    bench_binding.show(rows)


def test_a_process_that_ends_is_named_with_its_words() -> None:
    task = Task("", "", UNBOUND, "optimizer", (Place("0", 1, "0", 1, "nothing"),), **TOY)
    with pytest.raises(TeamError, match="nothing"):
        Team.start([replace(task, way=BY_NAME["main thread (upstream's call)"])])


# -- labels and arithmetic -------------------------------------------------------------------------


def test_each_rung_of_the_ladder_is_another_way() -> None:
    for ways in (LADDER, STUDY, ZENFLOW_STUDY):
        assert (
            len({way.name for way in ways})
            == len({replace(way, name="") for way in ways})
            == len(ways)
        )


def test_who_binds_stands_in_the_command_and_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    where = (Place("0-3", 2, "0-1", 1, "2,3"), Place("4-7", 2, "4-5", 1, "6,7"))
    path = tmp_path / "task"
    for way in BY_NAME.values():
        task = Task("", "", way, "offload", where)
        words = command(task, 1, path)
        assert ("taskset -c 4-7" in " ".join(words)) == (way.launcher == "taskset")
        assert ("--bind_cores_to_rank" in words) == (way.launcher == "deepspeed")
        variables = environment(task, 1)
        assert variables.get("OMP_NUM_THREADS") == ("2" if way.launcher == "taskset" else None)
        assert variables.get("OMP_WAIT_POLICY") == ("passive" if way.asleep else None)
        assert variables["LOCAL_RANK"] == "1"
    alone = Task("", "", TASKSET, "optimizer", where)
    assert command(alone, 0, path)[:3] == ["taskset", "-c", "2,3"]
    assert environment(alone, 0)["OMP_NUM_THREADS"] == "2"


def test_plain_zero_is_the_first_row_of_each_study_and_has_all_cores_of_its_rank() -> None:
    where = (Place("0-3", 2, "0-1", 1, "2,3"),)
    for part in ("offload", "upstream", "ours"):
        zero = ways_of(part, None)[0]
        (task,) = tasks(part, zero, where, toy_args())
        assert (task.load, task.way.launcher) == ("zero", "taskset")
        assert (task.places[0].training, task.places[0].training_cores) == ("0-3", 2)
    assert "ours, tuned" in {way.name for way in ways_of("ours", None)}
    assert "ours, tuned" not in {way.name for way in ways_of("offload", None)}
    assert [task.load for task in tasks("beside", UNBOUND, where, toy_args())] == [
        "training",
        "optimizer",
    ]


def test_a_step_is_the_slowest_ranks_and_counts_are_all_ranks() -> None:
    turns = [
        [Turn(0.1, 1, 2, 3), Turn(0.2, 10, 20, 30)],
        [Turn(0.4, 1, 2, 3), Turn(0.3, 30, 20, 10)],
    ]
    found = figures(turns)
    assert (found["step ms"]["min"], found["step ms"]["max"]) == (
        pytest.approx(200),
        pytest.approx(400),
    )
    assert (found["involuntary"], found["migrations"], found["queued_ms"]) == (21, 22, 23)


def test_practicality_is_plain_zeros_step_over_the_rows() -> None:
    rows = [
        {"way": "plain ZeRO, taskset", "step ms": {"median": 30.0}},
        {"way": "unbound", "step ms": {"median": 60.0}},
        {"way": "ours, all threads", "step ms": {"median": 40.0}},
    ]
    compare(rows)
    assert [row["practicality"] for row in rows] == [1, 0.5, 0.75]
    assert [row["ratio"] for row in rows] == [0.5, 1, pytest.approx(2 / 3)]


def test_a_thread_outside_of_its_part_is_an_error(tmp_path: Path) -> None:
    task = Task("", "", OURS, "ours", (Place("0-1", 2, "0", 1, "1"),))
    good = Team((task,), tmp_path, facts={("ours", 0): Facts(1, {"0": 9}, {"1": 3})})
    require_within(good)
    for bad in (Facts(1, {"0": 8, "0-1": 1}, {"1": 3}), Facts(1, {"0": 9}, {"0": 1, "1": 2})):
        with pytest.raises(TeamError, match="expected every thread on"):
            require_within(Team((task,), tmp_path, facts={("ours", 0): bad}))


def test_counts_are_those_of_the_time_between() -> None:
    before = {(1, 1): Counts(5, 1, 2.0, 3.0), (1, 2): Counts(1, 1, 1.0, 1.0)}
    after = {(1, 1): Counts(7, 1, 2.5, 4.0), (1, 3): Counts(2, 0, 0.5, 1.0)}
    assert threads.between(before, after) == Counts(4, 0, 1.0, 2.0)
    assert threads.between(before, after).each(2) == Counts(2, 0, 0.5, 1.0)
    own = threads.read([os.getpid()])[os.getpid(), os.getpid()]
    assert own.run_ms > 0
