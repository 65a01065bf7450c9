"""DeepSpeed's own examples: the picture is of what was measured, and configs differ as they say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from studies import deepspeed_examples as study


def test_the_picture_is_current() -> None:
    kept = json.loads(study.RESULT.read_text())
    drawn = study.picture(kept["losses"])
    assert study.PICTURE.read_text() == drawn, "python -m studies.deepspeed_examples"
    ET.fromstring(drawn)


def test_rows_of_a_script_begin_alike_where_initialize_changes_no_weight() -> None:
    losses = json.loads(study.RESULT.read_text())["losses"]
    first = {name: losses[name][0] for name in study.COLORS}
    assert first["ours, its config"] == first["ours, predictive"] == first["ZeRO-Offload"]
    assert first["DeepSpeed's ZenFlow"] != first["ZeRO-Offload"]


@pytest.mark.parametrize("case", study.CASES, ids=lambda case: case.name)
def test_only_runs_of_ours_have_the_extension(case: study.Case) -> None:
    assert case.extended == ("ours" in case.name)
    config = study.config_of(case)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert ("optimizer" in config) == (case.script == study.ZENFLOW)
