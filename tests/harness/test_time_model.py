"""The study of published steps: its inputs hold together, its schedules are what they say, and its
page is current."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.commands.memory.setup import Setup
from deepspeed_ext.commands.memory.traffic import Machine, step_time
from deepspeed_ext.config import ZenFlowConfig
from studies.time_model import inputs, page, upstream
from studies.time_model.inputs import Inputs, Row, System
from studies.time_model.schedules import base_of, implied_host, ours, predicted

READ = inputs.read()
ROWS = pytest.mark.parametrize("row", READ.rows, ids=lambda row: f"{row.system}, {row.name}")


def made(schedule: str, machine: Machine, **fields) -> tuple[Row, Inputs]:
    """A row of 1e9 parameters on two GPUs of one host, 3 s without offload, and inputs with one
    system."""
    system = System(schedule, "", down=2, up=4, passed=30)  # type: ignore[arg-type]
    row = Row("a", "it", "https://x.org", "here", 1e9, 2, 2, 5.0, "step", base=3.0)
    found = replace(READ, machines={"here": machine}, systems={"it": system}, rows=[row])
    return replace(row, **fields), found


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text() == page.written(page.PAGE.read_text(), READ), (
        "run python -m studies.time_model"
    )


def test_the_picture_is_current(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page.draw(READ, tmp_path / "drawn.svg")
    rows, drawn = (
        path.read_text().count("<!-- ") for path in (page.PICTURE, tmp_path / "drawn.svg")
    )
    assert rows == drawn
    assert all(f"<!-- {row.name} -->" in page.PICTURE.read_text() for row in READ.rows)


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="begin verdict"):
        page.written("# Nothing", READ)


@ROWS
def test_a_row_says_where_it_comes_from_and_has_what_its_prediction_needs(row: Row) -> None:
    assert row.source.startswith("https://")
    assert 0 < row.per_host <= row.gpus
    assert row.quantity in ("pass", "exposed") or (row.base is None) == bool(row.tokens)
    assert predicted(row, READ) > 0


@ROWS
def test_a_prediction_does_not_use_the_published_number(row: Row) -> None:
    assert predicted(row, READ) == predicted(replace(row, published=17 * row.published), READ)


def test_a_row_of_an_unknown_machine_is_refused(tmp_path: Path) -> None:
    found = json.loads(inputs.FILE.read_text())
    found["rows"][0]["machine"] = "nowhere"
    (tmp_path / "published.json").write_text(json.dumps(found))
    with pytest.raises(KeyError, match="nowhere"):
        inputs.read(tmp_path / "published.json")


@pytest.mark.parametrize(
    ("schedule", "machine", "seconds"),
    [
        # per GPU 0.5e9 parameters: down 1, up 2 at 1 GB/s; in host memory 30e9 bytes of both
        ("serial", Machine(link=1e9, host=10e9), 3 + 1 + 2 + 3),
        ("pipelined", Machine(link=1e9, host=10e9), 3 + 3),
        ("pipelined", Machine(link=1e9, host=30e9), 3 + 2),
        ("behind backward", Machine(link=1e9, host=30e9), 1 + 2),
        ("behind backward", Machine(link=1e9, host=10e9), 1 + 3),
        ("behind backward", Machine(link=1e9, host=300e9), 3),
    ],
)
def test_schedules_are_what_they_say(schedule: str, machine: Machine, seconds: float) -> None:
    assert predicted(*made(schedule, machine)) == pytest.approx(seconds, rel=1e-3)


def test_half_offloaded_costs_half() -> None:
    machine = Machine(link=1e9, host=10e9)
    assert predicted(*made("serial", machine, share=0.5)) - 3 == pytest.approx(3)
    assert predicted(*made("pipelined", machine, share=0.5)) - 3 == pytest.approx(1.5)


def test_recomputed_activations_leave_more_backward_to_hide_behind() -> None:
    machine = Machine(link=1e9, host=30e9 / 2.2)
    plain = predicted(*made("behind backward", machine))
    assert plain == pytest.approx(1 + 2.2, rel=1e-3)
    assert predicted(*made("behind backward", machine, recompute=True)) == pytest.approx(3.0)


def test_zero_offload_is_the_packages_own_model() -> None:
    machine = Machine(link=1e9, host=10e9)
    row, found = made("package", machine)
    time = step_time(row.model, row.ranks, Setup(stage=2, offload=True, pins=True), machine)
    assert predicted(row, found) == pytest.approx(3 + time.exposed, rel=1e-3)
    slow = replace(machine, link=0.5e9)  # gradients take 4 s, backward only 2
    time = step_time(row.model, row.ranks, Setup(stage=2, offload=True, pins=True), slow)
    assert predicted(row, found, slow) == pytest.approx(1 + 4 + time.exposed, rel=1e-3)


def test_deepspeeds_zenflow_is_the_mean_of_an_interval() -> None:
    machine = Machine(link=10e9, host=100e9)
    row, found = made("zenflow", machine)
    time = upstream.step(row.model, row.ranks, 2, machine)
    assert time.beside < 12
    assert predicted(row, found) == pytest.approx(3 + time.exposed / 4)


def test_quantities_are_what_they_say() -> None:
    machine = Machine(link=1e9, host=10e9, flops=1e12)
    assert predicted(*made("serial", machine, quantity="pass")) == pytest.approx(24 * 1e9 / 10e9)
    row, found = made("serial", machine, base=None, tokens=1000, quantity="TFLOPS")
    assert base_of(row, machine) == pytest.approx(6)
    assert predicted(row, found) == pytest.approx(6 / (6 + 6), rel=1e-3)
    row, found = made("behind backward", machine, quantity="times ZeRO-Offload")
    found.systems["ZeRO-Offload"] = System("package", "")
    steps = [
        predicted(replace(row, system=name, quantity="step"), found)
        for name in ("ZeRO-Offload", "it")
    ]
    assert predicted(row, found) == pytest.approx(steps[0] / steps[1])


@ROWS
def test_the_implied_speed_makes_the_prediction_right(row: Row) -> None:
    host = implied_host(row, READ)
    machine = READ.machines[row.machine]
    if host is None:
        ends = [predicted(row, READ, replace(machine, host=speed)) for speed in (1e7, 1e15)]
        assert not min(ends) < row.published < max(ends)
    else:
        assert predicted(row, READ, replace(machine, host=host)) == pytest.approx(
            row.published, rel=1e-6
        )


def test_ours_hides_what_fits_into_a_step_and_no_more() -> None:
    row, _ = made("serial", Machine())
    assert ours(row, Machine(link=100e9, host=1000e9)) == 3.0
    slow = Machine(link=100e9, host=1e9)
    time = step_time(
        row.model, row.ranks, Setup(stage=3, zenflow=ZenFlowConfig(update_interval=1)), slow
    )
    assert ours(row, slow) == time.host > 3.0


def test_a_ratio_below_one_is_a_slower_step_whatever_was_published() -> None:
    machine = Machine(link=1e9, host=10e9, flops=1e12)
    row, found = made("serial", machine, published=18.0)
    assert page.ratio(row, found) == pytest.approx(0.5, rel=1e-3)
    row, found = made("serial", machine, base=None, tokens=1000, quantity="TFLOPS", published=0.25)
    assert page.ratio(row, found) == pytest.approx(0.5, rel=1e-3)
