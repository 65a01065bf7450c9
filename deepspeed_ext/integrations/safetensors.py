"""Saves a model as the safetensors files that Hugging Face's libraries load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from deepspeed_ext.errors import UnsupportedError

__all__ = ["save"]

_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save(
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: str | os.PathLike[str],
    max_shard_bytes: int = 2 << 30,
) -> list[Path]:
    """Write tensors to ``model.safetensors``, or to numbered shards and their index.

    If consecutive names share one tensor, only the first is written, as ``save_pretrained`` does.
    An older model in the folder is replaced only after everything is written; files of other names
    stay.

    Args:
        weights: names and tensors, such as `deepspeed_ext.weights(engine, on_rank=0)`, copied
            before the next is taken. All ranks call this; one that gets no tensors writes nothing.
        max_shard_bytes: largest file; a shard is held in host memory until it is written. A larger
            tensor gets a file of its own.

    Returns:
        The files, the index last.

    Raises:
        UnsupportedError: safetensors is not installed. No tensor was read.
        OSError: a file could not be written; what was there before still is.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UnsupportedError(
            "writing safetensors needs the library of that name: pip install safetensors"
        ) from error
    folder, shard = Path(folder), dict[str, torch.Tensor]()
    written: list[tuple[Path, list[str], int]] = []  # with names and bytes of the tensors

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".model-{len(written) + 1:05}.safetensors.part"
        written.append((path, list(shard), _nbytes(shard)))
        save_file(shard, path, metadata={"format": "pt"})
        shard.clear()

    try:
        last: torch.Tensor | None = None
        for name, tensor in weights:
            if tensor is last:
                continue
            last = tensor
            if shard and _nbytes(shard) + tensor.nbytes > max_shard_bytes:
                write()
            shard[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if shard:
            write()
        return _renamed(folder, written) if written else []
    finally:
        for path, *_ in written:
            path.unlink(missing_ok=True)


def _nbytes(shard: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def _renamed(folder: Path, written: list[tuple[Path, list[str], int]]) -> list[Path]:
    """Give the files their names, write the index, and remove an older model's other files."""
    count, where, names = len(written), dict[str, str](), list[str]()
    for number, (path, tensors, _) in enumerate(written, start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        path.replace(folder / name)
        names.append(name)
        where |= dict.fromkeys(tensors, name)
    if count > 1:
        total = sum(nbytes for *_, nbytes in written)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        part = folder / f".{_INDEX}.part"
        part.write_text(json.dumps(index, indent=2) + "\n")
        part.replace(folder / _INDEX)
        names.append(_INDEX)
    for path in folder.iterdir():
        if path.name not in names and (path.name == _INDEX or _OURS.fullmatch(path.name)):
            path.unlink(missing_ok=True)
    return [folder / name for name in names]
