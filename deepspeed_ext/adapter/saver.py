"""Saves and loads an engine's checkpoints on all ranks together, if the optimizer runs in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from deepspeed_ext.adapter.async_checkpoint_engine import AsyncCheckpointEngine
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.zenflow_parts import zenflow_of
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import KeptError, RankGroup
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["Saver"]


class Saver:
    """Wraps what DeepSpeed's engine does while it saves and loads.

    Attributes:
        files: our checkpoint engine; None: DeepSpeed's own checkpoint engine is used.
    """

    def __init__(self, files: JointCheckpointEngine | None = None) -> None:
        self.files = files

    @classmethod
    def of(
        cls,
        config_params: Any,
        world: RankGroup,
        *,
        leads: bool,
        host: HostOptimizer | None,
        async_save: bool,
    ) -> Saver:
        """Build the checkpoint engine that the run asks for; see `JointCheckpointEngine` for the arguments.

        Args:
            host: the optimizer whose process writes p, m and v; None: the engine has no optimizer.
        """
        coded = None if host is None else host.coded
        files: JointCheckpointEngine
        if host is not None and async_save:
            files = AsyncCheckpointEngine(config_params, world, leads, host.link, coded)
        else:
            files = JointCheckpointEngine(config_params, world, leads, coded)
        files.maps_files = bool(config_params.zero_config.pipeline_loading_checkpoint)
        return cls(files)

    @contextmanager
    def saving(self, names_latest: bool) -> Iterator[bool]:
        """Wrap a save; it begins with a collective if another save is in progress. If an exception interrupts the save,
        it is undone.

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

    @contextmanager
    def writing(self, optimizer: Any) -> Iterator[None]:
        """`keeping`, around what writes the state of `optimizer` at once, or copies it first."""
        zenflow = None if self.files is None else zenflow_of(optimizer)
        with self.keeping(), nullcontext() if zenflow is None else zenflow.state.uncopied():
            yield

    def copied_without(self, error: OSError, save_path: str) -> None:
        """Continue without DeepSpeed's recovery script, which could not be copied.

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
        """Complete a save in progress, if all ranks have written everything. A collective if one is in progress.

        Raises:
            CheckpointError: on every rank, if the save failed.
        """
        if isinstance(self.files, AsyncCheckpointEngine):
            self.files.finish_if_written()

    def finish_alone(self) -> None:
        """Complete a save in progress, without the other ranks.

        Raises:
            CheckpointError: on the leading rank, if any rank could not write.
        """
        if isinstance(self.files, AsyncCheckpointEngine):
            self.files.finish_alone()

    def finished_alone(self, host: HostOptimizer | None) -> KeptError:
        """Call `finish_alone`; keep its error, unless a step has already reported its cause."""
        kept = KeptError()
        with kept.keeping():
            self.finish_alone()
        if kept.error is not None and host is not None and host.link.failed:
            logger.error(str(kept.take()))
        return kept
