"""Writes a checkpoint file without the bytes of its tensors, then fills these in, straight from the
tensors' memory.

`torch.save` can leave out the bytes (`torch.serialization.skip_data`). The file then has its full
size, with a hole for each storage. Once the holes are filled, `torch.load` reads it like any other
file. So the host needs no copy of any tensor; those on an accelerator pass through one small chunk.
`fill_holes` also writes the CRC of each storage, so that the file is a valid zip file.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.memory import host_empty
from deepspeed_ext.zenflow.step.state_store import ShownTensor, plain

_STORAGE = "data"
_PROTOCOL = 2
"""Of pickle, as in `torch.save`."""
_LENGTHS = struct.Struct("<26xHH")
"""Of the name and the extra field, at the end of a record's header."""
_ENTRY = struct.Struct("<28xHHH12x")
"""Entry of the directory, with a CRC at byte 16: lengths of name, extra field and comment."""
_CRC_PLACE, _DESCRIPTOR_CRC_PLACE = 16, 4
"""Bytes before the CRC in an entry of the directory, and in the descriptor behind a record."""


class SkeletonError(Exception):
    """The content has storages that no plain tensor refers to."""


@dataclass(frozen=True)
class Hole:
    """Where in the file the bytes of a storage and their CRC belong: `values`, uint8 [nbytes], a
    storage on the host, or the elements of an accelerator tensor."""

    values: torch.Tensor
    offset: int
    crc_offsets: tuple[int, ...] = ()


def write_skeleton(content: Any, path: str) -> list[Hole]:
    """Write a file of `content` without the bytes of its tensors; return the hole of each storage
    that is not empty, once. Accelerator tensors become contiguous host tensors in the file, each
    with its own storage; only identical ones, such as tied weights, share one.

    Raises:
        SkeletonError: not all storages could be found, for instance those of a tensor subclass; the
            file is then unusable.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    sources: dict[int, torch.Tensor] = {}
    stand_ins: dict[tuple[Any, ...], torch.Tensor] = {}

    class Recorder(pickle.Pickler):
        """Notes storages in the order in which `torch.save` numbers them."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, ShownTensor):  # nothing is in flight while a file is written
                value = plain(value)
                noted = self.reducer_override(value)
                return value.__reduce_ex__(_PROTOCOL) if noted is NotImplemented else noted
            is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            if not is_plain or value.layout != torch.strided or value.is_meta or value.is_quantized:
                return NotImplemented
            if value.device.type == "cpu":
                storage = value.untyped_storage()
                storages.setdefault(id(storage), storage)
                return NotImplemented
            if type(value) is torch.nn.Parameter:  # its data is pickled next
                return NotImplemented
            place = (
                value.device,
                value.data_ptr(),
                value.dtype,
                value.shape,
                value.stride(),
                value.requires_grad,
            )
            stand_in = stand_ins.setdefault(place, _stand_in(value))
            storage = stand_in.untyped_storage()
            storages.setdefault(id(storage), storage)
            sources[id(storage)] = (
                value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            )
            return stand_in.__reduce_ex__(_PROTOCOL)

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(
            content, path, pickle_module=SimpleNamespace(Pickler=Recorder, __name__=pickle.__name__)
        )
    places = _places(path)
    if [storage.nbytes() for storage in storages.values()] != [nbytes for nbytes, *_ in places]:
        raise SkeletonError(
            f"{path} has {len(places)} storages, but {len(storages)} were found in the content, "
            "or their sizes differ"
        )
    holes = []
    for (key, storage), (nbytes, offset, crcs) in zip(storages.items(), places, strict=True):
        values = sources.get(key)
        if values is None:
            values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        holes += [Hole(values, offset, crcs)] if nbytes else []
    return holes


def fill_holes(path: str, holes: Sequence[Hole]) -> None:
    """Write the bytes of `holes` and their CRCs to their file."""
    most = max(
        (hole.values.nbytes for hole in holes if hole.values.device.type != "cpu"), default=0
    )
    chunk = host_empty(min(STAGING_CHUNK_BYTES, most), torch.uint8, pin=True) if most else None
    with files.opened(path, os.O_WRONLY) as descriptor:
        for hole in holes:
            offset, crc = hole.offset, 0
            for part in _on_host(hole.values, chunk):
                memory = files.memory_at(part.data_ptr(), part.nbytes)
                crc = files.write_summed(descriptor, memory, offset, crc)
                offset += part.nbytes
            files.write_crc(descriptor, crc, hole.crc_offsets)


def _on_host(values: torch.Tensor, chunk: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield `values` in parts on the host. Those from an accelerator are copied to `chunk` and
    valid until the next."""
    for part in values.split(STAGING_CHUNK_BYTES):
        if part.device.type == "cpu":
            yield part
        else:
            assert chunk is not None
            yield chunk[: part.nbytes].copy_(part)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor like `tensor`, without memory."""
    with FakeTensorMode():
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )


def _places(path: str) -> list[tuple[int, int, tuple[int, int]]]:
    """The storages in a file of `torch.save`, in the order of their numbers: bytes, offset and
    `Hole.crc_offsets` of each."""
    found: dict[int, tuple[int, int, tuple[int, int]]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entry = archive.start_dir
        for record in archive.infolist():
            file.seek(record.header_offset)
            header = file.read(_LENGTHS.size)
            offset = record.header_offset + len(header) + sum(_LENGTHS.unpack(header))
            behind = offset + record.file_size
            places = (entry + _CRC_PLACE, behind + _DESCRIPTOR_CRC_PLACE)
            folder, _, number = record.filename.partition("/")[2].partition("/")
            if folder == _STORAGE and number.isdecimal():
                found[int(number)] = record.file_size, offset, places
            file.seek(entry)
            entry += _ENTRY.size + sum(_ENTRY.unpack(file.read(_ENTRY.size)))
    return [found[number] for number in sorted(found)]
