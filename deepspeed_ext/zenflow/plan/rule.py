"""Defines what the plan needs to know of an update rule: its settings, and the resulting sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.places import Arrival, Places
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["RuleSettings"]


@dataclass(frozen=True)
class RuleSettings(ABC):
    """Settings of a rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    """Optimizer steps handed over together; None: chosen by measurement."""
    block_size: int = field(kw_only=True)
    """Elements per block; the worker splits its work at block boundaries."""
    layout: StateLayout = field(default=ADAM_STATE, kw_only=True)
    """The optimizer's state."""

    @property
    @abstractmethod
    def shortest_interval(self) -> int:
        """The shortest interval that the settings allow."""

    @property
    @abstractmethod
    def longest_interval(self) -> int:
        """`update_interval`, or the longest interval that may be chosen; the ring has slots for
        it."""

    @abstractmethod
    def ring_at(self, interval: int | None, arrival: Arrival) -> int:
        """Slots of the gradient ring in use at `interval`. None (not chosen yet): as many as
        interval 1 needs, so that it always fits."""

    @property
    @abstractmethod
    def steps_each_gradient(self) -> bool:
        """Whether the worker takes one step per gradient, so gradients may come in chunks.
        Otherwise it reads all gradients of an interval at once."""

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

    @property
    def per_block_width(self) -> int:
        """Elements of the per-block array for one block."""
        return self.layout.per_block_width(self.block_size)
