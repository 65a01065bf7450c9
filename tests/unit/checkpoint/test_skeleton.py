"""A file whose bytes are written later equals one of `torch.save`."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from deepspeed_ext.checkpoint import skeleton
from deepspeed_ext.checkpoint.skeleton import SkeletonError, fill_holes, write_skeleton
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.same import assert_same

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of their own, views of each other, empty ones and parameters."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    values = torch.randint(
        0, 2, (*shape, 3), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    tensor = values.to(draw(st.sampled_from(DTYPES)))
    kind = draw(st.sampled_from(("whole", "part", "transposed", "parameter")))
    if kind == "part":
        return tensor[..., 1:]
    if kind == "transposed":
        return tensor.transpose(0, -1)
    return torch.nn.Parameter(tensor.float()) if kind == "parameter" else tensor


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
contents = st.recursive(
    tensors() | plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.tuples(inner, inner)
        | inner.map(lambda value: [value, value])
    ),
    max_leaves=12,
)


def fill(content: Any, path: Path) -> None:
    holes = write_skeleton(content, str(path))
    fill_holes(str(path), holes[::-1])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=contents)
def test_equal_to_torch_save(content: Any, tmp_path: Path) -> None:
    """Values, views of one storage, the size of the file and its CRCs; mapped and read, also with
    ``weights_only``."""
    ours, theirs = tmp_path / "own" / "file.pt", tmp_path / "torch" / "file.pt"
    for path in (ours, theirs):
        path.parent.mkdir(exist_ok=True)
    fill(content, ours)
    torch.save(content, theirs)
    assert ours.stat().st_size == theirs.stat().st_size
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None
    for how in ({"mmap": True}, {"weights_only": True}, {"weights_only": False}):
        assert_same(torch.load(theirs, **how), torch.load(ours, **how), "content")


def test_one_storage_has_one_hole(tmp_path: Path) -> None:
    whole = torch.arange(100)
    content = {
        "a": whole,
        "b": whole[7:9],
        "c": torch.nn.Parameter(whole.float()),
        "empty": torch.empty(0),
    }
    assert len(write_skeleton(content, str(tmp_path / "f"))) == 2
    fill(content, tmp_path / "f")
    loaded = torch.load(tmp_path / "f")
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


class Tagged(torch.Tensor):
    """A subclass, which pickles in its own way."""


@pytest.mark.parametrize(
    "hidden", [torch.arange(5).untyped_storage(), torch.arange(5.0).as_subclass(Tagged)]
)
def test_storages_that_are_not_found_are_an_error(hidden: Any, tmp_path: Path) -> None:
    """The engine then saves as if nothing went on beside."""
    with pytest.raises(SkeletonError, match="storages"):
        write_skeleton({"first": torch.ones(3), "hidden": hidden}, str(tmp_path / "f"))


def from_an_accelerator(folder: str) -> None:
    flat = torch.arange(1000, dtype=torch.float32).bfloat16()
    there = on_device(flat)
    content = {
        "views": [there[:300].view(30, 10), torch.nn.Parameter(there[300:307])],
        "tied": [there[400:500], there[400:500]],
        "transposed": there[500:512].view(3, 4).t(),
        "number": on_device(torch.tensor(7)),
        "trained": on_device(torch.arange(3.0)).requires_grad_(),
        "empty": there[:0],
        "host": torch.arange(5),
    }
    path = f"{folder}/file.pt"
    with patch.object(skeleton, "STAGING_CHUNK_BYTES", 64):
        fill_holes(path, write_skeleton(content, path))
    loaded = torch.load(path)  # as it is: nothing in the file belongs to the accelerator
    assert_same(
        tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), content),
        loaded,
        "content",
    )
    assert loaded["views"][0].untyped_storage().nbytes() == 600
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert isinstance(loaded["views"][1], torch.nn.Parameter)
    assert loaded["trained"].requires_grad
    assert not loaded["views"][0].requires_grad
    assert there.device.type == "sim"


def test_tensors_of_an_accelerator_pass_through_a_chunk_and_are_the_hosts_in_the_file(
    tmp_path: Path,
) -> None:
    run_ranks(1, from_an_accelerator, str(tmp_path), device="sim")
