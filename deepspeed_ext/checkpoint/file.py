"""Holds what all files of a checkpoint share: the id of their save, and errors that name the
file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.words import one_line

__all__ = ["reading", "save_id_of", "with_save_id", "without_save_id"]

_SAVE_ID = "deepspeed_ext_save_id"
"""Key of the save's id. If a file has only tensors, it is an attribute of the dict instead, because
DeepSpeed reads every key of an expert's file as the name of a weight."""


def with_save_id(content: Mapping[str, Any], save_id: str) -> dict[str, Any]:
    """A copy of a file's content that also holds the id of its save."""
    if not content or not all(isinstance(value, torch.Tensor) for value in content.values()):
        return {**content, _SAVE_ID: save_id}
    tensors = OrderedDict(content)
    setattr(tensors, _SAVE_ID, save_id)
    return tensors


def save_id_of(content: Any) -> Any:
    """The id of the save that a file's content belongs to; None: it has none."""
    held = content.get(_SAVE_ID) if isinstance(content, Mapping) else None
    return getattr(content, _SAVE_ID, None) if held is None else held


def without_save_id(content: Any) -> Any:
    """A file's content as DeepSpeed saves it."""
    if isinstance(content, dict):
        content.pop(_SAVE_ID, None)
        return dict(content) if hasattr(content, _SAVE_ID) else content
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
