"""Verifies the checksums in checkpoint files while the files are read.

A file of `torch.save` is a zip file of uncompressed records, with the CRC of each in its directory
and after its bytes. `torch.load` verifies neither. Here zlib verifies every record that a load
uses, in threads beside the load, from the page cache.

Files have no checksums (0) if `torch.serialization.set_crc32_options` has switched them off, nor
have files in torch's older format; they are loaded with a warning.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.log import warn_once

__all__ = ["SMALL_BYTES", "Record", "checking", "records", "require_sound"]

SMALL_BYTES = 1 << 20
"""Records up to this size, among them all pickles, are verified before they are read."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of a record: signature, 22 other bytes, lengths of its name and its extra field."""
_DIRECTORY_ENTRY = struct.Struct("<16x4x8xHHH12x")
"""Entry of the directory: a CRC at byte 16, and the lengths of name, extra field and comment."""
_RECORD, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_DESCRIPTORS = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}
"""Data descriptor after a record, by its length: signature, CRC, and the size twice."""
_CHUNK_BYTES = 1 << 20
_THREADS = 4


@dataclass(frozen=True)
class Record:
    """A record of a file.

    Attributes:
        name: without the folder that all names begin with, such as ``data/0`` for the first
            storage.
        nbytes: its size.
        offset: of its first byte in the file.
        crc: the checksum in the file; 0: none.
        crc_offsets: where the file has it.
    """

    name: str
    nbytes: int
    offset: int
    crc: int
    crc_offsets: tuple[int, ...]

    @property
    def has_sum(self) -> bool:
        return self.crc != 0 or self.nbytes == 0


def records(path: str) -> list[Record]:
    """The records of a file of `torch.save`, in the order of its directory.

    Raises:
        CheckpointError: the file is damaged: its records are not contiguous, or their sizes or
            checksums differ from those in the directory.
        zipfile.BadZipFile: it has no directory.
    """
    found: list[Record] = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entry = archive.start_dir
        members = archive.infolist()
        ends = [member.header_offset for member in members[1:]] + [archive.start_dir]
        for member, end in zip(members, ends, strict=True):
            file.seek(member.header_offset)
            mark, *lengths = _LOCAL_HEADER.unpack(_exactly(file.read(_LOCAL_HEADER.size), path))
            offset = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
            behind = offset + member.file_size
            if mark != _RECORD or member.compress_type != zipfile.ZIP_STORED or behind > end:
                raise _damaged(path, f"at byte {member.header_offset:,}")
            places = [entry + 16]
            if behind != end:
                file.seek(behind)
                _require_descriptor(
                    file.read(end - behind) if end - behind < 64 else b"", member, path
                )
                places.append(behind + len(_DESCRIPTOR))
            _, _, name = member.filename.partition("/")
            found.append(Record(name, member.file_size, offset, member.CRC, tuple(places)))
            file.seek(entry)
            lengths = list(
                _DIRECTORY_ENTRY.unpack(_exactly(file.read(_DIRECTORY_ENTRY.size), path))
            )
            entry += _DIRECTORY_ENTRY.size + sum(lengths)
    return found


def _exactly(header: bytes, path: str) -> bytes:
    if len(header) not in (_LOCAL_HEADER.size, _DIRECTORY_ENTRY.size):
        raise _damaged(path, "and ends in the middle of a record")
    return header


def _require_descriptor(descriptor: bytes, member: zipfile.ZipInfo, path: str) -> None:
    layout = _DESCRIPTORS.get(len(descriptor))
    expected = (_DESCRIPTOR, member.CRC, member.file_size, member.file_size)
    if layout is None or layout.unpack(descriptor) != expected:
        raise _damaged(path, f"after its record {member.filename!r}")


@contextmanager
def checking(path: str) -> Iterator[None]:
    """Wrap a block that reads a whole file: small records are verified before it, the others at the
    same time.

    Raises:
        CheckpointError: the file is damaged; it replaces any error of the block.
    """
    large = require_sound(path, most_bytes=SMALL_BYTES)
    with ThreadPoolExecutor(_THREADS, "deepspeed_ext-sums") as threads:
        checks = [threads.submit(_require_same, path, record) for record in large]
        try:
            yield
        finally:
            for check in checks:
                check.result()


def require_sound(path: str, most_bytes: int | None = None) -> Sequence[Record]:
    """Verify the checksums of a file's records.

    Args:
        most_bytes: leave out larger records; None: verify all.

    Returns:
        The records that were left out and have checksums.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        found = records(path)
    except zipfile.BadZipFile as error:
        with open(path, "rb") as file:
            if file.read(2) == _RECORD[:2]:
                raise _damaged(path, f"or incomplete ({error})") from None
        found = []
    if not found or not all(record.has_sum for record in found):
        folder, name = os.path.split(path)
        warn_once(f"{folder}: files such as {name} have no checksums, so damage would go unnoticed")
    summed = [record for record in found if record.has_sum]
    now = [record for record in summed if most_bytes is None or record.nbytes <= most_bytes]
    with ThreadPoolExecutor(_THREADS, "deepspeed_ext-sums") as threads:
        list(threads.map(_require_same, [path] * len(now), now))
    return [record for record in summed if record not in now]


def _require_same(path: str, record: Record) -> None:
    crc, chunk = 0, memoryview(bytearray(min(_CHUNK_BYTES, record.nbytes)))
    place, end = record.offset, record.offset + record.nbytes
    with files.opened(path, os.O_RDONLY) as descriptor:
        while place < end:
            size = os.preadv(descriptor, [chunk[: end - place]], place)
            if size == 0:
                break
            crc, place = zlib.crc32(chunk[:size], crc), place + size
    if place < end or crc != record.crc:
        raise _damaged(
            path,
            f"in its record {record.name!r}: "
            f"the checksum of its bytes is {crc:08x}, expected {record.crc:08x}",
        )


def _damaged(path: str, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged {how}: load an earlier checkpoint by its tag")
