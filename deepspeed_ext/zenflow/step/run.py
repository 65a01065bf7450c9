"""The ``zenflow`` section of a run, with what only the run knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.step.supported import require_group_timeout

__all__ = ["ZenFlowRun"]


@dataclass(frozen=True)
class ZenFlowRun:
    """The section as the user wrote it, and two values that the run adds.

    Attributes:
        config: the section.
        worker_timeout_seconds: longest wait for the worker: the user's, or a lower default.
        steps_per_epoch: optimizer steps of an epoch; None: unknown, because DeepSpeed did not build the data loader.
    """

    config: ZenFlowConfig
    worker_timeout_seconds: float
    steps_per_epoch: int | None = None

    @classmethod
    def of(
        cls, config: ZenFlowConfig, group_timeouts_seconds: Iterable[float] = (), steps_per_epoch: int | None = None
    ) -> ZenFlowRun:
        """Add to `config` what the run knows.

        The default timeout is lowered if the collectives in which other ranks wait meanwhile would time out first.

        Args:
            config: the section.
            group_timeouts_seconds: timeouts of the process groups in which other ranks wait for this one; none: there
                are no others.
            steps_per_epoch: optimizer steps of an epoch, if known.

        Raises:
            ConfigError: the user asks for a timeout that is not below the collectives'.
        """
        timeout = config.worker_timeout_seconds
        shortest = min(group_timeouts_seconds, default=float("inf"))
        if timeout >= shortest:
            if "worker_timeout_seconds" in config.model_fields_set:
                require_group_timeout(timeout, shortest)
            timeout = shortest / 2
        return cls(config, timeout, steps_per_epoch)
