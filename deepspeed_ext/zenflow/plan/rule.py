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
    ROUNDED_CHUNK_NUMEL,
    StateLayout,
    chunk_of,
)

__all__ = [
    "FLOAT_BYTES",
    "PredictiveSettings",
    "RuleBytes",
    "RuleSettings",
    "head_step_bytes",
    "slots_at",
]

FLOAT_BYTES = DTYPE_BYTES["float32"]
_ROUNDING_BYTES = {"float32": 0, "bfloat16": 2 * FLOAT_BYTES + 24, "int8": 2 * FLOAT_BYTES + 42}
"""Temporaries per element while torch operations round its moments at random, by their dtype: both
in fp32, and three numbers of 8 bytes; or two, and the fp32 numbers of which a code is made."""
_SIGN_BYTES = 1


@dataclass(frozen=True)
class RuleBytes:
    """Bytes that a rule takes for a partition, where its gradients are.

    Attributes:
        kept: kept besides the weights, by kind.
        saved: size of each tensor in a checkpoint, besides the arena.
        step: maximum temporaries while the weights are computed.
    """

    kept: dict[str, int] = field(default_factory=dict)
    saved: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True)
class RuleSettings(ABC):
    """Settings of a rule, as plain values; see the fields of the same names in `ZenFlowConfig`.

    Attributes:
        limits: why the rule runs only Adam with fp32 moments, on data-parallel ranks, and with no
            share on the accelerator; empty: it has none of these limits.
        steps_beside_worker: whether the rule steps blocks where the gradients are, and so predicts
            nothing.
        overlapped: whether steps after the warm-up are overlapped.
        warm_up_steps: synchronous steps at the start; None: the schedule chooses.
        block_size: elements per block; the worker splits its work at block boundaries.
        layout: the optimizer's state.
        warning: what the user should know of the settings; None: nothing.
    """

    limits: ClassVar[str] = ""
    steps_beside_worker: ClassVar[bool] = False

    overlapped: bool
    warm_up_steps: int | None
    block_size: int = field(kw_only=True)
    layout: StateLayout = field(default=ADAM_STATE, kw_only=True)
    warning: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def nbytes(self, numel: int, item: int = 0, *, in_place: bool = False) -> RuleBytes:
        """The bytes that the rule takes for a partition.

        Args:
            item: bytes of an element of the weights and of y.
            in_place: whether y is in a landing buffer, so it is not copied to the accelerator in
                parts.
        """

    @property
    def estimates(self) -> bool:
        """Whether a step may compute weights from y and an estimate."""
        return self.overlapped and not self.steps_beside_worker

    def slots(self, source: Source) -> int:
        """Slots of a partition's gradients, which they take in turn."""
        return slots_at(source) if self.overlapped else 1

    def per_block(self, places: Places) -> PerBlock | None:
        """The array that estimates are made from, copied to the accelerator if they are made
        there; None: nothing is estimated."""
        goes_there = places.gradient is Place.ACCELERATOR
        return PerBlock(*self.layout.per_block, exchanged=goes_there) if self.estimates else None

    @property
    def per_block_width(self) -> int:
        """Elements of the per-block array for one block."""
        return self.layout.per_block_width(self.block_size)

    def head_bytes(self, numel: int) -> int:
        """Bytes of accelerator memory of `numel` elements, whole blocks, that step there: p, the
        moments in their own dtype, and a byte for each scale of codes."""
        scales = len(self.layout.scales) * (numel // self.block_size)
        return sum(DTYPE_BYTES[dtype] for _, dtype in self.layout.arrays) * numel + scales


def slots_at(source: Source) -> int:
    """Number of slots for gradients that overlapped steps need.

    Note: [the slot of y]
    y replaces the gradient that went into it, in its slot. The slot may be reused once the step has
    read y, so not if the next gradient arrives before that.
    """
    return 1 if source is Source.COPY else 2


@dataclass(frozen=True)
class PredictiveSettings(RuleSettings):
    """Settings of the predictive rule and of the exact one, which never overlaps."""

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

    def nbytes(self, numel: int, item: int = 0, *, in_place: bool = False) -> RuleBytes:
        """Kept: 1 / d_b of each block. With signs, the signs and means of m.

        Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
        `Estimator.predict`, to which y comes in parts, for others one. With signs two, and a byte
        for each sign. A kernel needs none, but whether it can run is not known before the run.
        """
        if not self.overlapped:
            return RuleBytes()
        signs = self.layout.with_signs
        entries = -(-numel // self.block_size) * self.per_block_width
        kept = {"signs and means" if signs else "derived denominators": FLOAT_BYTES * entries}
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        y, factor = chunk * (0 if in_place else item), FLOAT_BYTES * -(-chunk // self.block_size)
        floats = 2 if signs else 3 if item < FLOAT_BYTES else 1
        others = max(chunk * _SIGN_BYTES, y) if signs else max(y, factor)
        return RuleBytes(kept, tuple(kept.values()), floats * FLOAT_BYTES * chunk + others)


def head_step_bytes(numel: int, block_size: int, layout: StateLayout = ADAM_STATE) -> int:
    """Bytes of temporaries while `numel` elements step beside the worker, if no kernel can run: two
    fp32 arrays of one chunk, what rounding takes, and three numbers per block."""
    rounds = layout.moment_dtype != "float32"
    at_once = ROUNDED_CHUNK_NUMEL if rounds else ACCELERATOR_CHUNK_NUMEL
    chunk = min(numel, chunk_of(at_once, block_size))
    per_element = 2 * FLOAT_BYTES + _ROUNDING_BYTES[layout.moment_dtype]
    return per_element * chunk + 3 * FLOAT_BYTES * (chunk // block_size)
