"""Every file holds the id of its save, and one of nothing but tensors holds no other key for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.checkpoint.file import save_id_of, with_save_id, without_save_id
from deepspeed_ext.checkpoint.skeleton import fill_holes, write_skeleton

TENSORS = {"a.weight": torch.arange(3.0), "a.bias": torch.ones(2)}
MIXED = {"module": TENSORS, "step": 3}


@pytest.mark.parametrize("content", [TENSORS, MIXED, {}])
@pytest.mark.parametrize("in_holes", [False, True])
def test_the_id_is_read_from_the_file_and_is_not_in_what_it_holds(
    content: dict[str, Any], in_holes: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "file.pt")
    if in_holes:
        fill_holes(path, write_skeleton(with_save_id(content, "id"), path))
    else:
        torch.save(with_save_id(content, "id"), path)
    read = torch.load(path, weights_only=True)
    assert save_id_of(read) == "id"
    found = without_save_id(read)
    assert list(found) == list(content)
    assert save_id_of(found) is None


def test_plain_deepspeed_reads_nothing_but_tensors_from_a_file_of_tensors() -> None:
    assert list(with_save_id(TENSORS, "id")) == list(TENSORS)


def test_files_of_earlier_versions_have_the_id_among_the_tensors() -> None:
    earlier = {**TENSORS, "deepspeed_ext_save_id": "id"}
    assert save_id_of(earlier) == "id"
    assert list(without_save_id(earlier)) == list(TENSORS)


@pytest.mark.parametrize("content", [{"step": 3}, [torch.ones(2)], None])
def test_files_of_others_have_none(content: Any) -> None:
    assert save_id_of(content) is None
    assert without_save_id(content) is content
