"""Saves and loads an engine's checkpoints on all ranks together, if the optimizer runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from deepspeed_ext.adapter.async_checkpoint_engine import AsyncCheckpointEngine
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import KeptError, RankGroup
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam

__all__ = ["Saver"]


class Saver:
    """Stands before the checkpoint engine that DeepSpeed calls.

    Attributes:
        files: our checkpoint engine; None: DeepSpeed's own writes and reads the files.
    """

    def __init__(self, files: JointCheckpointEngine | None = None) -> None:
        self.files = files

    @classmethod
    def of(
        cls, config_params: Any, world: RankGroup, *, leads: bool, adam: OffloadedAdam | None, async_save: bool
    ) -> Saver:
        """Build the checkpoint engine that the run asks for; see `JointCheckpointEngine` for the arguments.

        Args:
            adam: the optimizer whose process writes p, m and v; None: the engine has no optimizer.
            async_save: whether saves go on beside training.
        """
        if adam is not None and async_save:
            return cls(AsyncCheckpointEngine(config_params, world, leads, adam.link))
        return cls(JointCheckpointEngine(config_params, world, leads))

    @contextmanager
    def saving(self, names_latest: bool) -> Iterator[bool]:
        """Wrap a save; its beginning is a collective while another one goes on. What an exception breaks off is undone.

        Args:
            names_latest: whether the save updates ``latest``.

        Yields:
            Whether DeepSpeed is to update ``latest`` itself.
        """
        if self.files is None:
            yield names_latest
            return
        self.files.begin_save(names_latest)
        try:
            yield False
        except BaseException:
            self.files.break_off()
            raise

    def keeping(self) -> AbstractContextManager[None]:
        """Wrap what DeepSpeed does before it calls `commit`, which raises this rank's error on all ranks."""
        return nullcontext() if self.files is None else self.files.kept.keeping()

    def copied_without(self, error: OSError, save_path: str) -> None:
        """Go on without DeepSpeed's recovery script; its own checkpoint engine lets the save fail.

        Raises:
            OSError: `error`, with DeepSpeed's own checkpoint engine.
        """
        if self.files is None:
            raise error
        logger.warning(
            f"{save_path}: zero_to_fp32.py was not copied there ({error}); the checkpoint is complete without it"
        )

    def begin_load(self, load_dir: str, tag: Any) -> Any:
        """Find the checkpoint to load; returns its tag. A collective with our checkpoint engine."""
        return tag if self.files is None else self.files.begin_load(load_dir, tag)

    def after_step(self) -> None:
        """Complete a save that goes on, if all ranks have written everything. A collective while one goes on.

        Raises:
            CheckpointError: on every rank, if the save failed.
        """
        if isinstance(self.files, AsyncCheckpointEngine):
            self.files.finish_if_written()

    def finish_alone(self) -> None:
        """Complete a save that goes on, without the other ranks.

        Raises:
            CheckpointError: on the leading rank, if any rank could not write.
        """
        if isinstance(self.files, AsyncCheckpointEngine):
            self.files.finish_alone()

    def finished_alone(self, adam: OffloadedAdam | None) -> KeptError:
        """`finish_alone`; keeps its error, unless a step has told the user about its cause."""
        kept = KeptError()
        with kept.keeping():
            self.finish_alone()
        if kept.error is not None and adam is not None and adam.link.failed:
            logger.error(str(kept.take()))
        return kept
