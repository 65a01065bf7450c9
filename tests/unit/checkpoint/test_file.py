"""Every file says which save and which file it is; one of nothing but tensors has no key for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.checkpoint.file import marked, save_id_of, unmarked
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
    read = torch.load(path, weights_only=True)
    assert save_id_of(read, path) == "id"
    assert save_id_of(read, "elsewhere/file.pt") == "id"
    with pytest.raises(CheckpointError, match=r"other.pt was saved as file.pt"):
        save_id_of(read, "other.pt")
    found = unmarked(read)
    assert list(found) == list(content)
    assert save_id_of(found, "other.pt") is None


def test_plain_deepspeed_reads_nothing_but_tensors_from_a_file_of_tensors() -> None:
    assert list(marked(TENSORS, "id", "file.pt")) == list(TENSORS)


def test_files_of_earlier_versions_have_the_id_among_the_tensors_and_no_name() -> None:
    earlier = {**TENSORS, "deepspeed_ext_save_id": "id"}
    assert save_id_of(earlier, "any.pt") == "id"
    assert list(unmarked(earlier)) == list(TENSORS)


@pytest.mark.parametrize("content", [{"step": 3}, [torch.ones(2)], None])
def test_files_of_others_have_none(content: Any) -> None:
    assert save_id_of(content, "any.pt") is None
    assert unmarked(content) is content
