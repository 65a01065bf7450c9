"""Holds what all files of a checkpoint share: the id of their save, and errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_ext.errors import CheckpointError

__all__ = ["SAVE_ID", "reading"]

SAVE_ID = "deepspeed_ext_save_id"
"""Key of the save's id in every file."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Name the file in any error of the block, which reads it.

    Raises:
        CheckpointError: for any error of the block.
    """
    try:
        yield
    except Exception as error:  # torch and pickle can raise almost anything
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {said}): load an earlier checkpoint by its tag"
        ) from error
