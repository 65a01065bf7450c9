"""Adds run-time values to the ``zenflow`` section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.facts import Ratio

__all__ = ["ZenFlowRun"]


@dataclass(frozen=True)
class ZenFlowRun:
    """The section as the user wrote it, with values that are known only at run time.

    Attributes:
        worker_timeout_seconds: longest wait for the worker, as the user set it, or a default that
            may have been lowered.
        steps_per_epoch: optimizer steps per epoch; None: unknown, because DeepSpeed did not build
            the data loader.
        ratio: ``offload_optimizer.ratio``.
    """

    config: ZenFlowConfig
    worker_timeout_seconds: float
    steps_per_epoch: int | None = None
    ratio: Ratio = 1.0

    @classmethod
    def of(
        cls,
        config: ZenFlowConfig,
        group_timeouts_seconds: Iterable[float] = (),
        steps_per_epoch: int | None = None,
        ratio: Ratio = 1.0,
    ) -> ZenFlowRun:
        """Add the run-time values to `config`.

        The default timeout is lowered if the collectives in which other ranks wait would time out
        first.

        Args:
            group_timeouts_seconds: timeouts of the process groups in which other ranks wait for
                this one; empty if there are no other ranks.
            steps_per_epoch, ratio: see the attributes.

        Raises:
            ConfigError: the user's timeout is not below that of the collectives.
        """
        timeout = config.worker_timeout_seconds
        shortest = min(group_timeouts_seconds, default=float("inf"))
        if timeout >= shortest:
            if "worker_timeout_seconds" in config.model_fields_set:
                raise ConfigError(
                    f"zero_optimization.zenflow.worker_timeout_seconds = {timeout:g} is not below "
                    f"the process group's timeout of {shortest:g} s, after which the communication "
                    "library ends the job: lower it, or raise the group's timeout "
                    "(init_distributed, or DEEPSPEED_TIMEOUT in minutes)"
                )
            timeout = shortest / 2
        return cls(config, timeout, steps_per_epoch, ratio)
