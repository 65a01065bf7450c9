"""A port to another DeepSpeed is a change of one folder, and the contract says what has moved."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from deepspeed.checkpoint import constants

from tools.architecture import PACKAGE
from tools.rehearse_port import rehearsed


@pytest.mark.full  # test_contract.py and tests/shape hold both properties for what is there now
def test_renamed_members_are_named_and_only_the_adapter_uses_them() -> None:
    for name, told, files in rehearsed(seed=11, renames=12):
        assert told, f"the contract does not notice that {name} has moved"
        assert files, name
        assert [file for file in files if not file.startswith("adapter/")] == [], name


FOREIGN = {"param_groups", "num_experts", "num_local_experts"}
"""Words of torch's optimizers and of models' configs that DeepSpeed's checkpoints use, too."""
FILE_NAME = re.compile(r"mp_rank_|zero_pp_rank|layer_\d|_(?:model|optim|expert)_?states|states\.pt")


def words_of_checkpoints(path: Path) -> set[str]:
    """The keys and parts of file names of DeepSpeed's checkpoints that a file names in its code."""
    keys = {
        word
        for word in vars(constants).values()
        if isinstance(word, str) and "_" in word and not word.startswith("_")
    }
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
        if node.value in keys - FOREIGN or FILE_NAME.search(node.value)
    }


def test_only_the_adapter_names_keys_and_files_of_deepspeeds_checkpoints() -> None:
    found = {
        str(path.relative_to(PACKAGE)): words_of_checkpoints(path) for path in PACKAGE.rglob("*.py")
    }
    assert len(found["adapter/saved_checkpoint.py"]) > 10, "the test looks for what is not there"
    assert {file for file, words in found.items() if words and "adapter/" not in file} == set()
