"""Writes a checkpoint file without the bytes of its tensors, then the bytes themselves, from where they are.

`torch.save` can leave out the bytes (`torch.serialization.skip_data`). The file then has its full size, with a hole for
each storage. Once the holes are filled, `torch.load` reads it like any other file. So nothing is copied on the host:
neither its own tensors nor those of an accelerator, which pass through one small chunk.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.memory import host_empty

__all__ = ["Hole", "SkeletonError", "fill_holes", "write_skeleton"]

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a member of a zip file: 26 bytes, the length of its name, the length of its extra field."""
_PROTOCOL = 2
"""Of pickle, as in `torch.save`."""


class SkeletonError(Exception):
    """The content has storages that are not found through its plain tensors."""


@dataclass(frozen=True)
class Hole:
    """Where the bytes of a storage belong.

    Attributes:
        values: the bytes, uint8 [nbytes]: a storage of the host, or what a tensor of an accelerator holds.
        offset: bytes from the beginning of the file.
    """

    values: torch.Tensor
    offset: int


def write_skeleton(content: Any, path: str) -> list[Hole]:
    """Write a file that holds `content` except for the bytes of its tensors.

    Tensors of an accelerator are in the file as tensors of the host, contiguous and each with a storage of its own;
    only equal ones, such as tied weights, share one.

    Args:
        content: what `torch.save` can save.
        path: the file; an existing one is replaced.

    Returns:
        The hole of each storage. No two storages are the same, and none is empty.

    Raises:
        SkeletonError: not all storages could be found, for instance those of a tensor subclass. The file is useless.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    sources: dict[int, torch.Tensor] = {}
    stand_ins: dict[tuple[Any, ...], torch.Tensor] = {}

    class Recorder(pickle.Pickler):
        """Notes storages in the order in which `torch.save` numbers them."""

        def reducer_override(self, value: Any) -> Any:
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or not _has_storage(value):
                return NotImplemented
            if value.device.type == "cpu":
                storage = value.untyped_storage()
                storages.setdefault(id(storage), storage)
                return NotImplemented
            if type(value) is torch.nn.Parameter:  # what it holds is next
                return NotImplemented
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            stand_in = stand_ins.setdefault(place, _stand_in(value))
            storage = stand_in.untyped_storage()
            storages.setdefault(id(storage), storage)
            sources[id(storage)] = value.detach().reshape(-1).view(torch.uint8)
            return stand_in.__reduce_ex__(_PROTOCOL)

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, path, pickle_module=SimpleNamespace(Pickler=Recorder, __name__=pickle.__name__))
    found = _records(path)
    if [storage.nbytes() for storage in storages.values()] != [nbytes for nbytes, _ in found]:
        raise SkeletonError(f"{path} has {len(found)} storages, found {len(storages)}: they do not match in size")
    return [
        Hole(sources[key] if key in sources else _bytes_of(storage), offset)
        for (key, storage), (nbytes, offset) in zip(storages.items(), found, strict=True)
        if nbytes
    ]


def fill_holes(path: str, holes: Sequence[Hole]) -> None:
    """Write the bytes of `holes` to their file."""
    most = max((hole.values.nbytes for hole in holes if hole.values.device.type != "cpu"), default=0)
    chunk = host_empty(min(STAGING_CHUNK_BYTES, most), torch.uint8, pin=True) if most else None
    with files.opened(path, os.O_WRONLY) as descriptor:
        for hole in holes:
            if hole.values.device.type == "cpu":
                files.write_memory(descriptor, hole.values.data_ptr(), hole.values.nbytes, hole.offset)
                continue
            assert chunk is not None
            for begin in range(0, hole.values.nbytes, chunk.nbytes):
                part = chunk[: min(chunk.nbytes, hole.values.nbytes - begin)]
                part.copy_(hole.values[begin : begin + part.nbytes])
                files.write_memory(descriptor, part.data_ptr(), part.nbytes, hole.offset + begin)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host like `tensor`, without memory."""
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


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
