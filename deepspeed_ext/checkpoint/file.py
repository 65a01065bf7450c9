"""What all files of a checkpoint share: a mark that says which save and which file they are,
checksums, and errors that name the file.

A file of `torch.save` is a zip file of uncompressed records, with the checksum of each.
`torch.load` verifies none; here `zipfile` verifies every record that a load uses, in threads beside
the load, from the page cache. Files in torch's older format have no checksums, nor have those
written while `torch.serialization.set_crc32_options` had switched them off; they are loaded with a
warning.
"""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.words import one_line

__all__ = [
    "ROOM",
    "SMALL_BYTES",
    "advised",
    "checking",
    "marked",
    "reading",
    "require_sound",
    "save_id_of",
    "unmarked",
]

ROOM = "make room there, or save elsewhere"
"""What to do if a file cannot be written."""

_SAVE_ID, _FILE = "deepspeed_ext_save_id", "deepspeed_ext_file"
"""Keys of the save's id and of the file's name. If a file has only tensors, they are attributes of
the dict instead, because DeepSpeed reads every key of an expert's file as the name of a weight."""
SMALL_BYTES = 1 << 20
"""Records up to this size, among them all pickles, are verified before they are read."""
_CHUNK_BYTES = 1 << 20
_THREADS = 4

# Note: [whose file it is]
# DeepSpeed names a file after the rank and the partition that it is of, and nothing inside says so:
# files that were swapped, or copied over one another, would load as if they were right. So the name
# is inside, too.


def marked(content: Mapping[str, Any], save_id: str, path: str) -> dict[str, Any]:
    """A copy of a file's content that also says which save and which file it is."""
    mark = {_SAVE_ID: save_id, _FILE: os.path.basename(path)}
    if not content or not all(isinstance(value, torch.Tensor) for value in content.values()):
        return {**content, **mark}
    tensors = OrderedDict(content)
    vars(tensors).update(mark)
    return tensors


def save_id_of(content: Any, path: str) -> str | None:
    """The id of the save that a file's content belongs to; None: plain DeepSpeed wrote it.

    Raises:
        CheckpointError: the content was saved as another file than `path`.
    """
    if not isinstance(content, Mapping):
        return None
    mark = {**(vars(content) if isinstance(content, OrderedDict) else {}), **content}
    name = mark.get(_FILE, os.path.basename(path))
    if name != os.path.basename(path):
        raise CheckpointError(
            f"{path} was saved as {name}, so it is of another rank or partition: the files have "
            "been swapped, copied or renamed. Put them back, or load another checkpoint by its tag"
        )
    save_id = mark.get(_SAVE_ID)
    return None if save_id is None else str(save_id)


def unmarked(content: Any) -> Any:
    """A file's content as DeepSpeed saves it."""
    if isinstance(content, dict):
        for key in (_SAVE_ID, _FILE):
            content.pop(key, None)
        return dict(content) if isinstance(content, OrderedDict) and vars(content) else content
    return content


@contextmanager
def checking(path: str) -> Iterator[None]:
    """Wrap a block that reads a whole file: small records are verified before it, the others at the
    same time.

    Raises:
        CheckpointError: the file is damaged; it replaces any error of the block.
    """
    large = require_sound(path, most_bytes=SMALL_BYTES)
    with ThreadPoolExecutor(1, "deepspeed_ext-sums") as thread:
        check = thread.submit(_verify, path, large)
        try:
            yield
        finally:
            check.result()


def require_sound(path: str, most_bytes: int | None = None) -> Sequence[zipfile.ZipInfo]:
    """Verify the checksums of a file's records.

    Args:
        most_bytes: leave out larger records; None: verify all.

    Returns:
        The records that were left out and have checksums.

    Raises:
        CheckpointError: the file is damaged.
    """
    with open(path, "rb") as file:
        is_zip = file.read(2) == b"PK"
    found: Sequence[zipfile.ZipInfo] = ()
    if is_zip:
        with _damage(path), zipfile.ZipFile(path) as archive:
            found = archive.infolist()
    summed = [record for record in found if record.CRC or not record.file_size]
    if not found or len(summed) < len(found):
        folder, name = os.path.split(path)
        warn_once(f"{folder}: files such as {name} have no checksums, so damage would go unnoticed")
    small = [record for record in summed if most_bytes is None or record.file_size <= most_bytes]
    _verify(path, small)
    return [record for record in summed if record not in small]


def _verify(path: str, records: Sequence[zipfile.ZipInfo]) -> None:
    """Compare the bytes of `records` with their checksums."""
    if not records:
        return
    with (
        _damage(path),
        zipfile.ZipFile(path) as archive,
        ThreadPoolExecutor(_THREADS, "deepspeed_ext-sums") as threads,
    ):
        list(threads.map(lambda record: _read_through(archive, record), records))


def _read_through(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as bytes_of_record:
        while bytes_of_record.read(_CHUNK_BYTES):
            pass  # at the end it compares the checksum


@contextmanager
def _damage(path: str) -> Iterator[None]:
    """Turn an error of the block, which reads a zip file, into one that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a damaged header may say anything
        raise CheckpointError(
            f"{path} is damaged or incomplete ({one_line(error)}): load an earlier checkpoint by "
            "its tag"
        ) from None


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Wrap a block that reads the file, so that any error names it.

    Raises:
        CheckpointError: for any error of the block.
    """
    try:
        yield
    except CheckpointError:  # it names the file
        raise
    except Exception as error:  # torch and pickle can raise almost anything
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}): load an earlier checkpoint by its tag"
        ) from error


@contextmanager
def advised() -> Iterator[None]:
    """Wrap a block that writes, so that its error says what to do.

    Raises:
        CheckpointError: for any error, except our own.
    """
    try:
        yield
    except DeepSpeedExtError:
        raise
    except Exception as error:
        raise CheckpointError(f"{one_line(error)}. To go on: {ROOM}") from error
