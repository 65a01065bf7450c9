"""Every file says which save and which file it is; one of nothing but tensors has no key for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.checkpoint.file import SavedFile, marked, unmarked
from deepspeed_ext.checkpoint.skeleton import fill_holes, write_skeleton
from deepspeed_ext.errors import CheckpointError

TENSORS = {"a.weight": torch.arange(3.0), "a.bias": torch.ones(2)}
MIXED = {"module": TENSORS, "step": 3}


@pytest.mark.parametrize("content", [TENSORS, MIXED, {}])
@pytest.mark.parametrize("in_holes", [False, True])
def test_the_mark_is_read_from_the_file_and_is_not_in_what_it_holds(
    content: dict[str, Any], in_holes: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "file.pt")
    if in_holes:
        fill_holes(path, write_skeleton(marked(content, "id", path), path))
    else:
        torch.save(marked(content, "id", path), path)
    assert torch.load(path, weights_only=True) is not None
    file = SavedFile(path)
    assert file.save_id == "id"
    assert list(unmarked(file.sound)) == list(content)
    other = str(Path(path).rename(tmp_path / "other.pt"))
    with pytest.raises(CheckpointError, match=r"other.pt was saved as file.pt"):
        SavedFile(other)


def test_plain_deepspeed_reads_nothing_but_tensors_from_a_file_of_tensors() -> None:
    assert list(marked(TENSORS, "id", "file.pt")) == list(TENSORS)


@pytest.mark.parametrize(
    ("content", "save_id"), [({**TENSORS, "deepspeed_ext_save_id": "id"}, "id"), (MIXED, None)]
)
def test_files_of_earlier_versions_and_of_others(
    content: dict[str, Any], save_id: str | None, tmp_path: Path
) -> None:
    """They have the id among the tensors and no name, or neither."""
    torch.save(content, tmp_path / "any.pt")
    file = SavedFile(str(tmp_path / "any.pt"))
    assert file.save_id == save_id
    assert "deepspeed_ext_save_id" not in unmarked(file.sound)


@pytest.mark.parametrize("content", [[torch.ones(2)], None])
def test_what_is_no_dict_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "any.pt")
    with pytest.raises(CheckpointError, match="expected a dict"):
        SavedFile(str(tmp_path / "any.pt"))
