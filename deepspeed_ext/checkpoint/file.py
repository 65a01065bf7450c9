"""What all files of a checkpoint share: a mark that says which save and which file they are,
checksums, and errors that name the file.

A file of `torch.save` is a zip file of uncompressed records, with the checksum of each.
`torch.load` verifies none; here `zipfile` verifies every record before its bytes are used. Files in
torch's older format have no checksums, nor have those written while
`torch.serialization.set_crc32_options` had switched them off; they are loaded with a warning.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime.log import LOAD_ANOTHER, one_line, warn_once

ROOM = "make room there, or save elsewhere"
"""What to do if a file cannot be written."""

_SAVE_ID, _FILE = "deepspeed_ext_save_id", "deepspeed_ext_file"
"""Keys of the save's id and of the file's name. If a file has only tensors, they are attributes of
the dict instead, because DeepSpeed reads every key of an expert's file as the name of a weight."""
_SMALL_BYTES = 1 << 20
"""Records up to this size, among them all pickles, are verified before anything is read."""
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


def unmarked(content: Mapping[str, Any]) -> dict[str, Any]:
    """A file's content as DeepSpeed saves it."""
    return {key: value for key, value in content.items() if key not in (_SAVE_ID, _FILE)}


class SavedFile:
    """One file of a checkpoint, mapped: only what is used is read, and its pages can be evicted.

    Attributes:
        content: its dict. Only shapes of large tensors may be used: their bytes are not verified.
        save_id: of the save that it belongs to; None: plain DeepSpeed wrote it.

    Raises:
        CheckpointError: it cannot be read, is no dict, or was saved as another file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with reading(path):
            _require_sound(path, most_bytes=_SMALL_BYTES)
            maps = zipfile.is_zipfile(path)  # torch's older format cannot be mapped
            content = torch.load(path, map_location="cpu", mmap=maps, weights_only=False)
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path} holds a {type(content).__name__}, expected a dict: {LOAD_ANOTHER}"
            )
        self.content = content
        mark = {**(vars(content) if isinstance(content, OrderedDict) else {}), **content}
        name = mark.get(_FILE, os.path.basename(path))
        if name != os.path.basename(path):
            raise CheckpointError(
                f"{path} was saved as {name}, so it is of another rank or partition: the files "
                "have been swapped, copied or renamed. Put them back, or load another checkpoint "
                "by its tag"
            )
        save_id = mark.get(_SAVE_ID)
        self.save_id = None if save_id is None else str(save_id)

    @cached_property
    def sound(self) -> Mapping[str, Any]:
        """The content, once all checksums are verified.

        Raises:
            CheckpointError: the file is damaged.
        """
        with reading(self.path):
            _require_sound(self.path, least_bytes=_SMALL_BYTES + 1)
        return self.content


def _require_sound(path: str, least_bytes: int = 0, most_bytes: float = math.inf) -> None:
    with open(path, "rb") as file:
        is_zip = file.read(2) == b"PK"
    if not is_zip:
        _warn_of_unsummed(path)
        return
    try:
        with (
            zipfile.ZipFile(path) as archive,
            ThreadPoolExecutor(_THREADS, "deepspeed_ext-sums") as threads,
        ):
            found = archive.infolist()
            summed = [record for record in found if record.CRC or not record.file_size]
            if len(summed) < len(found):
                _warn_of_unsummed(path)
            wanted = [each for each in summed if least_bytes <= each.file_size <= most_bytes]

            def read_through(record: zipfile.ZipInfo) -> None:
                with archive.open(record) as bytes_of_record:
                    while bytes_of_record.read(_CHUNK_BYTES):
                        pass  # at the end it compares the checksum

            list(threads.map(read_through, wanted))
    except OSError:
        raise
    except Exception as error:  # a damaged header may say anything
        raise CheckpointError(
            f"{path} is damaged or incomplete ({one_line(error)}): load an earlier checkpoint by "
            "its tag"
        ) from None


def _warn_of_unsummed(path: str) -> None:
    folder, name = os.path.split(path)
    warn_once(f"{folder}: files such as {name} have no checksums, so damage would go unnoticed")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise any error of a block that reads a file or a folder as a `CheckpointError` that names
    it."""
    try:
        yield
    except CheckpointError as error:
        raise error if path in str(error) else CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # torch and pickle can raise almost anything
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}): load an earlier checkpoint by its tag"
        ) from error


@contextmanager
def advised() -> Iterator[None]:
    """Raise an error of a block that writes, except our own, as one that says what to do; others
    than those of files are of what cannot be pickled."""
    try:
        yield
    except DeepSpeedExtError:
        raise
    except Exception as error:
        remedy = f". To go on: {ROOM}" if isinstance(error, OSError | RuntimeError) else ""
        raise CheckpointError(f"{one_line(error)}{remedy}") from error
