"""Checks whether a library file is complete. Loading a truncated library kills the process, so this is checked first.

A library that we compile is sealed: a mark and the SHA-256 of the content are appended. Loaders ignore what follows the
parts of an ELF file that its headers describe.
"""

import hashlib
import os
import struct
from pathlib import Path

__all__ = ["is_whole_elf", "is_whole_sealed", "seal"]

_MARK = b"dsext-sealed\0"
_SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
_ELF64_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


def seal(path: Path) -> None:
    """Append the seal to the library; returns once the file is on disk."""
    with path.open("r+b") as file:
        content = file.read()
        file.write(_MARK + hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())


def is_whole_sealed(path: Path) -> bool:
    """Whether the file ends with a seal that matches its content.

    Raises:
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    body = content[:-_SEAL_BYTES]
    return content[len(body) :] == _MARK + hashlib.sha256(body).digest()


def is_whole_elf(path: Path) -> bool:
    """Whether an unsealed library reaches to the end of its section headers, which come last in the file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(_ELF64_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if not header.startswith(_ELF64_LITTLE_ENDIAN):
        return True  # another format: let the loader decide
    if len(header) < _ELF64_HEADER.size:
        return False
    fields = _ELF64_HEADER.unpack(header)
    sections_offset, section_bytes, sections = fields[6], fields[11], fields[12]
    return bool(sections_offset + section_bytes * sections <= size)
