"""The benchmark of a decoder: turns, errors that are rows, and each way to train as far as it runs
here."""

from __future__ import annotations

import json
import os
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.perf import bench_decoder, decoder_rank, decoder_ways, processes
from tests.perf.bench_decoder import Runner, times_of
from tests.perf.decoder_ways import WAYS
from tests.perf.processes import Processes, guarded
from tests.support.waiting import wait_to_be_killed

QUICK = shlex.split("--model toy --batches 1x16 2x16 --turns 2 --steps 2 --warm-up 3")


@pytest.fixture(autouse=True)
def _own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))


def measured(*words: str) -> list[dict[str, Any]]:
    return bench_decoder.measure(bench_decoder.arguments().parse_args([*QUICK, *words]))


@pytest.mark.full
def test_ways_take_turns_and_all_but_the_first_step_of_a_turn_are_in_the_mean(
    tmp_path: Path,
) -> None:
    rows = bench_decoder.with_practicality(measured("--ways", decoder_ways.ZERO.name, "ours"))
    names = [(row["way"], row["batch"]) for row in rows]
    assert names == [*product((decoder_ways.ZERO.name, "ours"), ("1x16", "2x16"))]
    assert all(row["steps"] == 4 and row["warm-up steps"] == 3 for row in rows)
    assert [row["practicality"] for row in rows[:2]] == [1.0, 1.0]
    for row in rows:
        assert [len(turn) for turn in row["step seconds"]] == [2, 2]
        assert (len(row["not counted, seconds"]), len(row["warm-up seconds"])) == (2, 3)
        assert row["mean ms"] == pytest.approx(250 * sum(map(sum, row["step seconds"])))
    assert rows[3]["practicality"] == pytest.approx(rows[1]["mean ms"] / rows[3]["mean ms"])
    assert {"wait ms", "worker ms", "planned device GiB", "device GiB"} <= set(rows[2])
    assert "error" not in rows[0]
    assert rows[0]["threads"] == str(len(os.sched_getaffinity(0))), "a rank of tests has one"
    kept = json.loads((tmp_path / "decoder.json").read_text())["rows"]
    assert all(row["made"]["versions"]["torch"] == torch.__version__ for row in kept)

    before = [row["made"] for row in kept]
    assert [row["made"] for row in measured("--ways", decoder_ways.ZERO.name, "ours")] == before
    assert "deviation ms" in bench_decoder.table(rows)


def test_what_does_not_run_or_hangs_is_a_row_with_its_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchao's optimizers refuse a machine without a GPU, or are not installed."""
    call = Runner._call

    def hangs(runner: Runner, seconds: float, body: Any, *args: Any) -> Any:
        if runner.way is decoder_ways.ZERO_OFFLOAD and body is decoder_rank.stretch:
            seconds = 0.001
        return call(runner, seconds, body, *args)

    monkeypatch.setattr(Runner, "_call", hangs)
    some = decoder_ways.TORCHAO, decoder_ways.FSDP2, decoder_ways.ZERO_OFFLOAD
    torchao, fsdp2, offload = (way.name for way in some)
    rows = measured("--ways", offload, torchao, fsdp2)
    errors = {row["way"]: row.get("error", "") for row in rows}
    assert errors[fsdp2] == ""
    assert "did not finish within 0 s" in errors[offload]
    says = "No package metadata was found", "only supports CUDA", "requires a CUDA device"
    assert any(text in errors[torchao] for text in says), errors[torchao]
    assert "did not finish" in bench_decoder.table(rows)


def test_a_way_is_kept_as_soon_as_it_is_warm_and_never_replaced_by_fewer_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, keep = list[list[int]](), bench_decoder.keep

    def look(*args: Any) -> None:
        keep(*args)
        kept.append([row["steps"] for row in bench_decoder.kept_rows("decoder")])
        if len(kept) == 4:  # no error, warm, and two turns on the first batch
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_decoder, "keep", look)
    with pytest.raises(KeyboardInterrupt):
        measured("--ways", "ours")
    assert kept == [[], [0], [2], [4]]
    monkeypatch.setattr(bench_decoder, "keep", keep)
    args = bench_decoder.arguments().parse_args([*QUICK, "--ways", "ours"])
    begun_anew = Runner(WAYS["ours"], args)
    begun_anew.warm_up = [1.0]
    begun_anew.facts = {"start seconds": 1, "threads": "1", "parameters": 1000}
    bench_decoder.keep([begun_anew], args)
    assert [row["steps"] for row in bench_decoder.kept_rows("decoder")] == [4]


@pytest.mark.full
@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if not way.needs])
def test_every_way_that_this_machine_has_trains_a_thousandth_of_the_model(way: str) -> None:
    words = shlex.split("--model 7m --batches 8x16 --turns 1 --steps 2 --warm-up 3 --alone")
    args = bench_decoder.arguments().parse_args([*words, "--ways", way])
    (row,) = bench_decoder.measure(args)
    assert "error" not in row, row["error"]
    assert row["steps"] == 2


def waiting() -> None:
    wait_to_be_killed()


def test_who_takes_the_last_memory_of_the_host_is_ended_and_the_reason_kept() -> None:
    contestant, left = Processes("greedy", 1, "cpu"), iter([9, 8, 2, 2, 2])
    try:
        guard = guarded(contestant, 3 * processes.GIB, lambda: next(left, 2) * processes.GIB)
        with pytest.raises(RuntimeError, match=r"greedy: out of host memory: 2\.0 GiB"), guard:
            contestant.call(waiting)
    finally:
        contestant.close()


def test_the_mean_of_a_long_run_has_its_warm_up_in_it() -> None:
    found = times_of([0.1, 0.3], [1.0] * 40, tokens=2000)
    assert found["mean ms"] == pytest.approx(200)
    assert found["ms with warm-up"] == pytest.approx((40 * 1000 + 960 * 200) / 1000)
    assert found["tokens/s"] == pytest.approx(10_000)
