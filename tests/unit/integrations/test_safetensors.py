"""A folder of safetensors as Hugging Face's libraries write and read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.integrations import safetensors
from tests.support.same import assert_same


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"layer.{n}": torch.randn(n, 50, generator=generator).bfloat16() for n in range(8)}
    found["head"] = found["layer.7"]  # tied
    return found


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    load_file = pytest.importorskip("safetensors.torch").load_file
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in where.items()}


def untied(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors(seed).items() if name != "head"}


def test_a_later_model_replaces_an_earlier_one(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    for seed, size in enumerate((1000, 700, 1 << 20, 1000)):
        files = safetensors.save(tensors(seed).items(), tmp_path, size)
        assert_same(untied(seed), dict(sorted(loaded(tmp_path).items())))
        assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()}
        assert (len(files) > 1) == (size < 1 << 20)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in untied().values())


def test_files_of_others_stay(tmp_path: Path) -> None:
    """The averaged weights of a user begin with the same word."""
    pytest.importorskip("safetensors")
    for name in ("model_ema.safetensors", "model.reference.safetensors", "config.json"):
        (tmp_path / name).write_text("mine")
    for size in (300, 1 << 20, 300):
        files = safetensors.save(tensors().items(), tmp_path, size)
    found = {path.name for path in tmp_path.iterdir()} - {path.name for path in files}
    assert found == {"model_ema.safetensors", "model.reference.safetensors", "config.json"}


def test_tensors_that_the_next_one_overwrites_are_saved(tmp_path: Path) -> None:
    """As those are that another process hands over: views of one memory."""
    pytest.importorskip("safetensors")
    memory = torch.empty(7, 50, dtype=torch.bfloat16)

    def views() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in untied().items():
            yield name, memory[: len(tensor)].copy_(tensor)

    safetensors.save(views(), tmp_path)
    assert_same(untied(), dict(sorted(loaded(tmp_path).items())))


def fails() -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors(1).items())[:6]
    raise OSError("the rank has failed")


def test_after_an_error_the_earlier_model_is_there(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    safetensors.save(tensors().items(), tmp_path, 1000)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match="the rank has failed"):
        safetensors.save(fails(), tmp_path, 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same(untied(), dict(sorted(loaded(tmp_path).items())))


def test_a_rank_without_weights_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert safetensors.save([], tmp_path / "folder") == []
    assert not (tmp_path / "folder").exists()


def test_without_the_library_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    stream = iter(tensors().items())
    with pytest.raises(UnsupportedError, match="pip install safetensors"):
        safetensors.save(stream, tmp_path)
    assert len(list(stream)) == len(tensors())
