"""Defines what the plan needs to know of an update rule: its settings, and the resulting sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.places import Arrival, Places
from deepspeed_ext.zenflow.plan.rule_bytes import RuleBytes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["RuleSettings"]


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
    def slots(self, arrival: Arrival) -> int:
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
    def per_block(self, places: Places) -> PerBlock:
        """The rule's per-block array."""

    @abstractmethod
    def nbytes(
        self,
        numel: int,
        weights_bytes: int = 0,
        *,
        arrived_bytes: int = 0,
        in_place: bool = False,
    ) -> RuleBytes:
        """The bytes that the rule takes for a partition.

        Args:
            weights_bytes: bytes of an element of the weights.
            arrived_bytes: bytes of an element of y.
            in_place: whether y is in a landing buffer, so it is not copied to the accelerator in
                parts.
        """

    @property
    def per_block_width(self) -> int:
        """Elements of the per-block array for one block."""
        return self.layout.per_block_width(self.block_size)
