"""What is generated from the config models is current, and the shipped configs and documents hold
together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deepspeed_ext.config import ZeroFields
from tests.support.config_models import models
from tests.support.paths import ROOT
from tools import config_reference

CONFIGS = sorted(
    path for path in (ROOT / "configs").glob("*.json") if path != config_reference.SCHEMA_FILE
)
SET_AT_RUN_TIME = {"steps_per_epoch"}
"""Fields that are no user's."""
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*.md")]
)


def test_generated_files_are_current() -> None:
    assert config_reference.REFERENCE_FILE.read_text() == config_reference.markdown(), (
        "run `make docs`"
    )
    assert config_reference.SCHEMA_FILE.read_text() == config_reference.json_schema(), (
        "run `make docs`"
    )


def test_reference_explains_every_field() -> None:
    reference = config_reference.markdown()
    for model in models(ZeroFields):
        for name, field in model.model_fields.items():
            assert (f"| `{name}`<br>" in reference) == (name not in SET_AT_RUN_TIME)
            assert field.description, f"{model.__name__}.{name} has no docstring"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_is_valid_and_documented(path: Path) -> None:
    zero = json.loads(path.read_text())["zero_optimization"]
    ours = {name: value for name, value in zero.items() if name in ZeroFields.model_fields}
    ZeroFields(**ours)
    assert "auto" not in ours.values()
    text = (ROOT / "configs" / "README.md").read_text()
    assert f"`{path.name}`" in text
    assert all(f"`{name}" in text or f".{name}" in text for name in zero)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), f"{path.name} links to {link}"
