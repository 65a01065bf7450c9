"""The keys of DeepSpeed's checkpoint files are DeepSpeed's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from deepspeed.checkpoint import constants

import deepspeed_ext
from deepspeed_ext.adapter.saved_checkpoint import Keys

PACKAGE = Path(deepspeed_ext.__file__).parent
KEYS = {name: value for name, value in vars(Keys).items() if name.isupper()}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_deepspeeds(name: str) -> None:
    assert getattr(constants, name) == KEYS[name]


def test_no_other_folder_has_a_key_or_a_file_name_of_deepspeeds_checkpoints() -> None:
    own = {"loss_scaler", "param_shapes", "zero_stage", "clip_grad"}  # words that we use, too
    parts = ("zero_pp_rank", "mp_rank_", "optim_states.pt", "model_states.pt")
    found = [
        (path.relative_to(PACKAGE), node.value)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "adapter"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in set(KEYS.values()) - own or any(part in node.value for part in parts)
    ]
    assert found == []
