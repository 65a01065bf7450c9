"""Checkpoint files that all ranks write and read together, or none does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import CheckpointError
from deepspeed_ext._upstream import TorchCheckpointEngine, dist

__all__ = ["JointCheckpointEngine"]

_ASIDE = ".partial"


class JointCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files, with one fate for all ranks.

    DeepSpeed's `save_checkpoint` communicates after each rank has written its files, so a rank that raises where its
    disk is full leaves the others waiting, and rank 0 may name a checkpoint ``latest`` that another rank has not
    finished. Here a file is written aside, an error is kept, and `commit`, which DeepSpeed calls on every rank, asks
    all of them: then either all files take their names, and after them ``latest``, or they are removed and every rank
    raises. A file that is there is whole, and what it replaces stays until it is.

    Args:
        config_params: as DeepSpeed's.
        ranks: every rank that saves and loads; each calls `load` equally often.

    Attributes:
        names_latest: whether the next `commit` is to name its checkpoint ``latest``; DeepSpeed itself then must not.
    """

    names_latest = False

    def __init__(self, config_params: Any, ranks: RankGroup) -> None:
        super().__init__(config_params)
        self._ranks = ranks
        self._aside: dict[str, str] = {}
        self._error: str | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            super().makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._note(path, error)

    def save(self, state_dict: Any, path: str) -> None:
        aside = path + _ASIDE
        self._aside[aside] = path
        try:
            super().save(state_dict, aside)
        except Exception as error:  # torch raises RuntimeError where the disk is full
            self._note(path, error)

    def commit(self, info: Any) -> bool:
        """Let what was saved take its name, on all ranks.

        Raises:
            CheckpointError: on every rank, if any could not write. Training can go on; checkpoints that were there
                are as before.
        """
        aside, self._aside = self._aside, {}
        latest = self._prepare_latest(info)
        try:
            self._require_all(f"checkpoint {info.tag!r} was not saved", "make room, or save elsewhere")
            for temporary, path in aside.items():
                try:
                    os.replace(temporary, path)
                except OSError as error:
                    self._note(path, error)
            self._require_all(f"checkpoint {info.tag!r} is not complete", "save again under another tag")
            if latest is not None:
                os.replace(latest + _ASIDE, latest)
        finally:
            for temporary in (*aside, *([latest + _ASIDE] if latest else [])):
                with contextlib.suppress(OSError):
                    os.remove(temporary)
            for folder in {os.path.dirname(path) for path in aside.values()}:
                with contextlib.suppress(OSError):  # it holds something: all is well
                    os.rmdir(folder)
        return super().commit(info)

    def _prepare_latest(self, info: Any) -> str | None:
        """Write the file ``latest`` aside, if it is this rank's to write; returns its path."""
        names_latest, self.names_latest = self.names_latest, False
        if not names_latest or self._ranks.rank != 0:
            return None
        latest = os.path.join(info.save_dir, "latest")
        try:
            Path(latest + _ASIDE).write_text(info.tag)
        except OSError as error:
            self._note(latest, error)
        return latest

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file.

        Raises:
            CheckpointError: on every rank, if any could not read its file. Load another checkpoint before training on.
        """
        content = None
        try:
            content = super().load(path, map_location)
        except Exception as error:  # torch and pickle raise nearly anything
            self._note(path, error)
        self._require_all("a file of the checkpoint cannot be read", "load an earlier checkpoint, by its tag")
        return content

    def _note(self, path: str, error: Exception) -> None:
        said = " ".join(str(error).split())
        self._error = self._error or f"rank {dist.get_rank()}: {path}: {type(error).__name__}: {said}"

    def _require_all(self, what: str, remedy: str) -> None:
        """Raise on every rank if any has noted an error, with all of them."""
        mine, self._error = self._error, None
        if self._ranks.all(mine is None):
            return
        errors = [error for error in self._ranks.gather(mine) if error]
        raise CheckpointError(f"{what}: {'; '.join(errors)}. To go on: {remedy}")
