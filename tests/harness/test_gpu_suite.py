"""The measurements for a GPU run at toy sizes without one, and no part of the suite can harm
another."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime import memory
from tests.perf import bench_decoder, card, decoder_ways, gpu_parts, report, suite
from tests.perf.part import OUT, Part, Running
from tests.support.pages import Block, failures
from tests.support.ranks import on_sim, run_ranks
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))


# -- the suite -------------------------------------------------------------------------------------


def fake(name: str, statement: str, limit: float = 60) -> Part:
    arguments = ("-n", "1", "-r", "1", statement)
    return Part(name, "timeit", arguments, arguments, limit)


def toy_args(*more: str) -> argparse.Namespace:
    return suite.arguments().parse_args(["--device", "cpu", "--toy", *more])


def test_a_part_that_fails_is_skipped_or_overruns_loses_nothing_of_the_others(
    tmp_path: Path,
) -> None:
    chosen = [
        fake("good", "print('measured')"),
        fake("bad", "raise SystemExit('broken')"),
        fake("slow", "import time; print('begun', flush=True); time.sleep(60)", limit=3),
        fake("large", f"import os; print('no card', flush=True); os._exit({card.SKIPPED})"),
        fake("last", "pass"),
    ]
    args = toy_args("--budget", "200")
    assert suite.measure(chosen, args) == 1
    rows = {row["part"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    assert {part: row["state"] for part, row in rows.items()} == {
        "good": "done",
        "bad": "failed",
        "slow": "overran",
        "large": "left out",
        "last": "done",
    }
    assert "measured" in rows["good"]["output"]
    assert "broken" in rows["bad"]["output"]
    assert rows["large"]["output"] == "no card"
    assert "begun" in rows["slow"]["output"]
    assert rows["slow"]["seconds"] < 30


def test_a_part_that_is_ended_leaves_neither_a_process_in_another_group_nor_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ninja gives each compiler a group of its own; one that went on would write into what the next
    part loads."""
    statement = (
        "import subprocess, pathlib; "
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); child.wait()"
    )
    running = Running(fake("builds", statement), "cpu", True, limit=600)
    wait_until((tmp_path / "pid").exists, "the start of the child")
    wait_until(lambda: bool((tmp_path / "pid").read_text()), "its id")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    running.end()
    assert not lock.exists()  # later parts would wait for it
    child = int((tmp_path / "pid").read_text())
    wait_until(
        lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie",
        "its end",
    )


def test_a_file_of_results_is_never_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.write("one", {}, [{"ms": 1}])

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        report.write("one", {}, [{"ms": 2}])
    assert json.loads((tmp_path / "one.json").read_text())["rows"] == [{"ms": 1}]


def test_without_an_accelerator_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert suite.main(["--parts", "losses"]) == 1
    assert "sees no accelerator" in capsys.readouterr().err
    assert suite.main(["--parts", "step/9b"]) == 2
    assert "step/9b" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_part_has_a_command_line_that_its_benchmark_takes() -> None:
    blocks = []
    for part in (part for parts in suite.PARTS.values() for part in parts()):
        for arguments in {part.arguments, part.toy}:
            words = [argument.replace(OUT, "outputs") for argument in arguments]
            text = shlex.join(["python", "-m", part.module, *words])
            blocks.append(Block(part.name, 0, "bash", text, False))
    (found,) = run_ranks(1, failures, blocks, pool="pages")
    assert not found, "\n".join(found)


def test_two_calls_have_room_for_what_is_worth_most_in_its_order() -> None:
    parts = gpu_parts.parts()
    names = [part.name for part in parts]
    assert names[:4] == ["operators", "7b/exact", "equal/3b", "step/1.5b"]
    assert sum(part.usual for part in parts[:4]) < 590, "what the tests leave of 700 s"
    assert all(part.usual < part.limit < 570 for part in parts)
    page = (report.ROOT / "docs/gpu.md").read_text()
    assert all(f"| `{name}` |" in page for name in names), "each with what is expected"


def steps_parts() -> list[tuple[Part, Any]]:
    parts = [part for part in gpu_parts.parts() if part.module == "tests.perf.bench_decoder"]
    return [(part, bench_decoder.arguments().parse_args(part.arguments)) for part in parts]


def test_what_a_buyer_runs_is_measured_and_every_way_has_its_limits() -> None:
    shown = {way for _, args in steps_parts() for way in args.ways}
    assert shown == set(decoder_ways.WAYS)
    for part, args in steps_parts():
        assert args.warm_up is None, "as many as the way needs"
        assert all(limit < part.limit for limit in args.limits), part.name
    assert decoder_ways.OURS.zero == {"zenflow": {}}
    small = [args for _, args in steps_parts() if args.card]
    assert {args.model for args in small} == {"3b", "7b"}
    assert all(args.card == gpu_parts.CARD_GIB for args in small)


# -- a card of 24 GB -------------------------------------------------------------------------------


def on_a_card(nbytes: int) -> tuple[tuple[int, int], int, int, str]:
    """What the device and the package say beside a ballast, and what a card above the device's
    memory says."""
    from tests.support.simulated_accelerator import simulation

    info = card.memory_info()
    assert info is not None
    library, device = simulation.library, get_accelerator().current_device()
    before = info()[1]
    try:
        library.set_memory_bytes(device, before - info()[0] + 2 * nbytes)
        with pytest.raises(card.CardError) as refused:
            card.hold(info()[1] + 1)
        ballast = card.hold(nbytes)
        card.show(nbytes)
        module = torch.get_device_module(ballast[0].device)
        return (
            module.mem_get_info(),
            memory.free_accelerator_bytes(),
            memory.total_accelerator_bytes(),
            str(refused.value),
        )
    finally:
        patch.stopall()
        library.set_memory_bytes(device, before)


def test_on_a_card_the_device_has_no_more_memory_for_whoever_asks() -> None:
    nbytes = 1 << 28
    ((free, total), package_free, package_total, refused) = on_sim(on_a_card, nbytes)[0]
    assert total == package_total == nbytes
    assert free == pytest.approx(nbytes, abs=card.CLOSE_BYTES)
    assert package_free >= free  # and what this process has cached
    assert package_free == pytest.approx(nbytes, abs=card.CLOSE_BYTES)
    assert "name a smaller card" in refused


def test_the_second_prepared_call_goes_on_where_the_first_stopped_although_out_is_empty(
    tmp_path: Path,
) -> None:
    page = (report.ROOT / "docs/gpu.md").read_text()
    calls = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if ".sh" in text]
    assert len(calls) == 2
    programs, checkout, out = (tmp_path / name for name in ("bin", "checkout", "out"))
    for folder in (programs, checkout):
        folder.mkdir()
    (checkout / "tests").symlink_to(report.ROOT / "tests")
    make = programs / "make"  # which says what it was asked for, and keeps what a suite would
    make.write_text('#!/bin/bash\n[ -z "$OUT" ] && echo "$@" >> outputs/bench/log\n')
    make.chmod(0o755)
    (checkout / "outputs" / "bench").mkdir(parents=True)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(out)}
    made = list[str]()
    for text in calls:
        assert len(text) <= 2000
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run(["bash", "-ec", text], cwd=checkout, env=environment, check=True, timeout=60)
        found = (out / "log").read_text().splitlines()
        assert found[: len(made)] == made, "what the first call kept is there"
        made = found
    budgets = [float(word) for line in made for word in re.findall(r"BUDGET=(\d+)", line)]
    assert sum(budgets) <= 700
    assert all(sum(budgets[i:j]) < 600 for i, j in ((0, 1), (1, None)))
