"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.rules.predictive.schedule import ring_of
from deepspeed_ext.zenflow.transfers.device_sizes import ACCELERATOR_CHUNK_NUMEL, chunk_of

__all__ = ["LONGEST_MEASURED", "PredictiveSettings"]

_FLOAT_BYTES = 4
LONGEST_MEASURED = 2
"""Interval 4 costs 7 % of the loss with larger batches (docs/lab/numerics.md): only a config chooses that."""


@dataclass(frozen=True)
class PredictiveSettings:
    """Settings of the predictive rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    overlapped: bool
    warm_up_steps: int | None
    """None: the schedule chooses."""
    block_size: int
    prediction_error_factor: float
    """0: no guard."""

    @classmethod
    def of(cls, config: ZenFlowConfig) -> PredictiveSettings:
        """Read the settings from a section."""
        return cls(
            update_interval=config.update_interval,
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            prediction_error_factor=config.prediction_error_factor,
        )

    @property
    def longest_interval(self) -> int:
        """`update_interval`, or the longest that measurement may choose."""
        return self.update_interval or LONGEST_MEASURED

    @property
    def slots(self) -> int:
        """Slots of the gradient ring at `longest_interval`."""
        return ring_of(self.longest_interval) if self.overlapped else 1

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The per-block array: means of v, which are copied to the accelerator."""
        return ("block_means", "float32", True)

    @property
    def drifts(self) -> bool:
        """Whether D is kept: the interval is, or may become, longer than one step."""
        return self.overlapped and self.update_interval != 1

    @property
    def with_drift(self) -> tuple[bool, ...]:
        """Whether estimates use D: all, none, or, as long as the interval is not measured, some."""
        return (True, False) if self.overlapped and self.update_interval is None else (self.drifts,)

    def kept_bytes(self, numel: int, weights_bytes: int) -> dict[str, int]:
        """Bytes on the accelerator beside the weights: 1 / d_b of each block, and D (see `RuleSettings`)."""
        if not self.overlapped:
            return {}
        drift = {"drift": numel * weights_bytes} if self.drifts else {}
        return {"derived denominators": _FLOAT_BYTES * -(-numel // self.block_size), **drift}

    def kept_host_bytes(self, numel: int) -> int:
        """The rule keeps nothing on the host outside of the arena."""
        return 0

    def moved_bytes(self, numel: int) -> int:
        """No state moves."""
        return 0

    def saved_bytes(self, numel: int, weights_bytes: int) -> list[int]:
        """Bytes of the tensors in a checkpoint: all that is kept (see `RuleSettings`)."""
        return list(self.kept_bytes(numel, weights_bytes).values())

    def waiting_bytes(self, numel: int, weights_bytes: int) -> int:
        """Weights are written at once."""
        return 0

    def exchange_bytes(self, numel: int, weights_bytes: int, ranks: int) -> int:
        """The rule changes all weights in every step."""
        return 0

    def step_bytes(self, numel: int, weights_bytes: int, arrived_bytes: int, in_place: bool) -> int:
        """Bytes of temporaries of `estimator.Estimator.predict` as torch operations (see `RuleSettings`).

        The gradient in fp32, with D also y in fp32, of one chunk. A kernel has none; whether there is one is not known
        before the run.
        """
        if not self.overlapped:
            return 0
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        arrived = 0 if in_place else chunk * arrived_bytes
        factor = _FLOAT_BYTES * -(-chunk // self.block_size)
        return (2 if self.drifts else 1) * _FLOAT_BYTES * chunk + max(arrived, factor)
