"""Whatever ZeRO-Offload accepts, ZenFlow accepts, or refuses by name for a reason: every row of
docs/drop_in.md."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

from tests.support.drop_in import ACCEPTED, ROWS, Row
from tests.support.drop_in_runs import apart, tried
from tests.support.ranks import run_fresh_ranks, run_ranks
from tools import drop_in

CASES = [
    pytest.param(row, stage, id=f"{row.setting}-{stage}") for row in ROWS for stage in row.stages
]


@pytest.mark.sampled(48)
@pytest.mark.parametrize(("row", "stage"), CASES)
def test_a_setting_of_zero_offload_does_what_the_table_says(
    row: Row, stage: int, tmp_path: Path
) -> None:
    run = run_fresh_ranks if row.alone else run_ranks
    outcomes = run(2, tried, row, stage, str(tmp_path))
    for outcome in outcomes:
        assert not getattr(outcome, "error", None), outcome
        found = getattr(outcome, "value", outcome)
        _compare(row, found)


def _compare(row: Row, found: dict) -> None:
    expected = found["offload"]
    if row.outcome.offload_trains is not None:
        assert row.outcome.offload_trains == isinstance(expected, dict), expected
    for rule in row.rules:
        actual = found[rule]
        if not row.outcome.trains:
            assert isinstance(actual, str), f"{rule} trains"
            assert row.named in actual
            continue
        assert isinstance(actual, dict), actual
        if row.outcome == ACCEPTED:
            continue
        loss, distance = apart(expected, actual, found["start"])
        assert loss < row.outcome.loss, rule
        assert distance < row.outcome.distance, rule
        assert all(map(math.isfinite, actual["losses"]))
    assert not found.get("resumed"), found["resumed"]


def test_the_page_is_the_rows() -> None:
    assert drop_in.PAGE.read_text() == drop_in.markdown(), "run `make docs`"


def test_every_field_of_deepspeeds_section_has_a_row() -> None:
    """So a field that a later DeepSpeed adds is not forgotten."""

    def names(row: Row) -> set[str]:
        section = row.changes.get("zero_optimization", {})
        nested = {
            f"{name}.{key}"
            for name, value in section.items()
            if isinstance(value, dict)
            for key in value
        }
        return set(section) | nested

    tried_fields = set().union(*(names(row) for row in ROWS))
    fields = {
        alias if isinstance(alias := field.alias, str) else name
        for name, field in DeepSpeedZeroConfig.model_fields.items()
    } - {"zenflow"}
    for section, model in (
        ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        fields |= {f"{section}.{name}" for name in model.model_fields}
    assert not fields - tried_fields
