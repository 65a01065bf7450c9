"""Holds what all files of a checkpoint share: a mark that says which save and which file they are,
and errors that name the file."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError
from deepspeed_ext.runtime.words import one_line

__all__ = ["ROOM", "advised", "marked", "reading", "save_id_of", "unmarked"]

ROOM = "make room there, or save elsewhere"
"""What to do if a file cannot be written."""

_SAVE_ID, _FILE = "deepspeed_ext_save_id", "deepspeed_ext_file"
"""Keys of the save's id and of the file's name. If a file has only tensors, they are attributes of
the dict instead, because DeepSpeed reads every key of an expert's file as the name of a weight."""

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
