"""Defines the settings of update rules, and the bytes that they take besides the arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.places import Place, Places, Source
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import (
    ACCELERATOR_CHUNK_NUMEL,
    DTYPE_BYTES,
    StateLayout,
    chunk_of,
)

__all__ = [
    "FLOAT_BYTES",
    "PredictiveSettings",
    "RuleBytes",
    "RuleSettings",
    "slots_at",
]

FLOAT_BYTES = DTYPE_BYTES["float32"]
_SIGN_BYTES = 1


@dataclass(frozen=True)
class RuleBytes:
    """Bytes that a rule takes for a partition.

    Attributes:
        kept: kept on the accelerator besides the weights, by kind.
        kept_on_host: kept on the host, outside the arena.
        saved: size of each tensor in a checkpoint, besides the arena.
        step: maximum temporaries while the weights are computed.
    """

    kept: dict[str, int] = field(default_factory=dict)
    kept_on_host: int = 0
    saved: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True)
class RuleSettings(ABC):
    """Settings of a rule, as plain values; see the fields of the same names in `ZenFlowConfig`.

    Attributes:
        limits: why the rule runs only Adam with fp32 moments, on data-parallel ranks, and with no
            share on the accelerator; empty: it has none of these limits.
    """

    limits: ClassVar[str] = ""

    overlapped: bool
    """Whether steps after the warm-up are overlapped."""
    warm_up_steps: int | None
    """Synchronous steps at the start; None: the schedule chooses."""
    block_size: int = field(kw_only=True)
    """Elements per block; the worker splits its work at block boundaries."""
    layout: StateLayout = field(default=ADAM_STATE, kw_only=True)
    """The optimizer's state."""

    warning: str | None = field(default=None, kw_only=True)
    """What the user should know of the settings; None: nothing."""

    @abstractmethod
    def slots(self, source: Source) -> int:
        """Slots of a partition's gradients, which they take in turn."""

    @property
    @abstractmethod
    def estimates(self) -> bool:
        """Whether a step may compute weights from y and an estimate."""

    @property
    @abstractmethod
    def steps_beside_worker(self) -> bool:
        """Whether the rule steps blocks where the gradients are."""

    @abstractmethod
    def per_block(self, places: Places) -> PerBlock | None:
        """The rule's per-block array; None: it reads none."""

    @abstractmethod
    def nbytes(
        self,
        numel: int,
        weights_bytes: int = 0,
        *,
        y_bytes: int = 0,
        in_place: bool = False,
    ) -> RuleBytes:
        """The bytes that the rule takes for a partition.

        Args:
            weights_bytes: bytes of an element of the weights.
            y_bytes: bytes of an element of y.
            in_place: whether y is in a landing buffer, so it is not copied to the accelerator in
                parts.
        """

    def head_bytes(self, numel: int) -> int:
        """Bytes of accelerator memory of `numel` elements, whole blocks, that step there: p, the
        moments in their own dtype, and a byte for each scale of codes."""
        scales = len(self.layout.scales) * (numel // self.block_size)
        return sum(DTYPE_BYTES[dtype] for _, dtype in self.layout.arrays) * numel + scales

    @property
    def per_block_width(self) -> int:
        """Elements of the per-block array for one block."""
        return self.layout.per_block_width(self.block_size)


def slots_at(source: Source) -> int:
    """Number of slots for gradients that overlapped steps need.

    Note: [the slot of y]
    y replaces the gradient that went into it, in its slot. The slot may be reused once the step has
    read y, so not if the next gradient arrives before that.
    """
    return 1 if source is Source.COPY else 2


@dataclass(frozen=True)
class PredictiveSettings(RuleSettings):
    """Settings of the predictive rule."""

    prediction_error_factor: float
    """0: no guard."""

    @classmethod
    def of(cls, config: ZenFlowConfig, *, layout: StateLayout = ADAM_STATE) -> PredictiveSettings:
        """Read the settings from a section."""
        return cls(
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            prediction_error_factor=config.prediction_error_factor,
            layout=layout,
        )

    def slots(self, source: Source) -> int:
        return slots_at(source) if self.overlapped else 1

    @property
    def estimates(self) -> bool:
        return self.overlapped

    @property
    def steps_beside_worker(self) -> bool:
        return False

    def per_block(self, places: Places) -> PerBlock | None:
        """What the estimate is made from, copied to the accelerator if estimates run there."""
        goes_there = places.gradient is Place.ACCELERATOR
        return PerBlock(*self.layout.per_block, exchanged=goes_there) if self.overlapped else None

    def nbytes(
        self,
        numel: int,
        weights_bytes: int = 0,
        *,
        y_bytes: int = 0,
        in_place: bool = False,
    ) -> RuleBytes:
        """Kept: 1 / d_b of each block. With Lion, the signs and means of m.

        Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
        `predict`, to which y comes in parts, for others one. With Lion two, and a byte
        for each sign. A kernel needs none, but whether it can run is not known before the run.
        """
        if not self.overlapped:
            return RuleBytes()
        remembered = "signs and means" if self.layout.with_signs else "derived denominators"
        entries = -(-numel // self.block_size) * self.per_block_width
        kept = {remembered: FLOAT_BYTES * entries}
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        y = 0 if in_place else chunk * y_bytes
        factor = FLOAT_BYTES * -(-chunk // self.block_size)
        if self.layout.with_signs:
            step = chunk * (2 * FLOAT_BYTES + max(_SIGN_BYTES, 0 if in_place else y_bytes))
            return RuleBytes(kept, saved=tuple(kept.values()), step=step)
        narrow = weights_bytes < FLOAT_BYTES
        step = (3 if narrow else 1) * FLOAT_BYTES * chunk + max(y, factor)
        return RuleBytes(kept, saved=tuple(kept.values()), step=step)
