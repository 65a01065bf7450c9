"""Only the adapter names keys and files of DeepSpeed's checkpoints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from deepspeed.checkpoint import constants

import deepspeed_ext

PACKAGE = Path(deepspeed_ext.__file__).parent
OWN = {"loss_scaler", "param_shapes", "zero_stage", "clip_grad"}
"""Words that we use, too."""


def test_no_other_folder_has_a_key_or_a_file_name_of_deepspeeds_checkpoints() -> None:
    texts = [path.read_text() for path in (PACKAGE / "adapter").glob("*.py")]
    names = {name for text in texts for name in re.findall(r"\bkeys\.([A-Z0-9_]+)", text)}
    keys = {getattr(constants, name) for name in names} - OWN
    parts = ("zero_pp_rank", "mp_rank_", "optim_states.pt", "model_states.pt")
    found = [
        (path.relative_to(PACKAGE), node.value)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "adapter"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in keys or any(part in node.value for part in parts)
    ]
    assert len(keys) > 5
    assert found == []
