"""Writes a checkpoint file without the bytes of its tensors, and returns where they belong.

`torch.save` can leave out the bytes (`torch.serialization.skip_data`). The file then has its full size, with a hole for
each storage. Once the holes are filled, `torch.load` reads it like any other file.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["Hole", "SkeletonError", "write_skeleton"]

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a member of a zip file: 26 bytes, the length of its name, the length of its extra field."""


class SkeletonError(Exception):
    """The content has storages that are not found through its plain tensors."""


@dataclass(frozen=True)
class Hole:
    """Where the bytes of a storage belong.

    Attributes:
        storage: the storage, on any device.
        offset: bytes from the beginning of the file.
    """

    storage: torch.UntypedStorage
    offset: int


def write_skeleton(content: Any, path: str) -> list[Hole]:
    """Write a file that holds `content` except for the bytes of its storages.

    Args:
        content: what `torch.save` can save.
        path: the file; an existing one is replaced.

    Returns:
        The hole of each storage. No two storages are the same, and none is empty.

    Raises:
        SkeletonError: not all storages could be found, for instance those of a tensor subclass. The file is useless.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    class Recorder(pickle.Pickler):
        """Notes storages in the order in which `torch.save` numbers them."""

        def reducer_override(self, value: Any) -> Any:
            if type(value) in (torch.Tensor, torch.nn.Parameter) and _has_storage(value):
                storage = value.untyped_storage()
                storages.setdefault(id(storage), storage)
            return NotImplemented

    with torch.serialization.skip_data():
        torch.save(content, path, pickle_module=SimpleNamespace(Pickler=Recorder, __name__=pickle.__name__))
    found = _records(path)
    if [storage.nbytes() for storage in storages.values()] != [nbytes for nbytes, _ in found]:
        raise SkeletonError(f"{path} has {len(found)} storages, found {len(storages)}: they do not match in size")
    return [Hole(storage, offset) for storage, (nbytes, offset) in zip(storages.values(), found, strict=True) if nbytes]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _records(path: str) -> list[tuple[int, int]]:
    """Size and offset of each storage in a file of `torch.save`, in the order of their numbers."""
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            _, _, name = member.filename.partition("/")
            if name.startswith("data/"):
                file.seek(member.header_offset)
                header = file.read(_LOCAL_HEADER.size)
                offset = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                found[int(name.removeprefix("data/"))] = (member.file_size, offset)
    return [found[number] for number in sorted(found)]
