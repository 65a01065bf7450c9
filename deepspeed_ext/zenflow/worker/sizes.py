"""Defines how many bytes ZenFlow's arrays take. Plain values, no torch: a start and a plan of memory use the same code.

Sizes are of one rank; its partitions are given by their numbers of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deepspeed_ext.zenflow.worker.arena import ArraySpec, partition_specs

__all__ = ["RuleSettings", "arena_specs", "gradient_dtype"]


class RuleSettings(Protocol):
    """Settings of a rule that are needed before the arena exists."""

    @property
    def update_interval(self) -> int | None:
        """Optimizer steps handed over together; None: chosen by measurement."""

    @property
    def longest_interval(self) -> int:
        """`update_interval`, or the longest that measurement may choose; the ring has slots for it."""

    @property
    def block_size(self) -> int:
        """Elements per block; the worker splits its work at block boundaries."""

    @property
    def slots(self) -> int:
        """Slots of the gradient ring at `longest_interval`."""

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """Kind and dtype of the rule's per-block array, and whether it is copied to the accelerator."""

    def kept_bytes(self, numel: int, weights_bytes: int) -> Mapping[str, int]:
        """Bytes on the accelerator that the rule keeps beside the weights of a partition, by kind.

        Args:
            numel: elements of the partition, n.
            weights_bytes: bytes of an element of the weights.
        """

    def kept_host_bytes(self, numel: int) -> int:
        """Bytes of page-locked host memory outside of the arena that the rule keeps for a partition of `numel`
        elements."""

    def moved_bytes(self, numel: int) -> int:
        """Bytes of host temporaries while state of a partition of `numel` elements moves to the accelerator."""

    def saved_bytes(self, numel: int, weights_bytes: int) -> Sequence[int]:
        """Bytes of each tensor of the rule's state of a partition in a checkpoint; arguments as for `kept_bytes`."""

    def step_bytes(self, numel: int, weights_bytes: int, arrived_bytes: int, in_place: bool) -> int:
        """Most bytes of temporaries on the accelerator while the weights of a partition are computed.

        Args:
            numel: elements of the partition, n.
            weights_bytes: bytes of an element of the weights.
            arrived_bytes: bytes of an element of y.
            in_place: y has a room on the accelerator, so that it is not copied there in parts.
        """

    def waiting_bytes(self, numel: int, weights_bytes: int) -> int:
        """Bytes of new weights on the accelerator that wait until all partitions are stepped; arguments as for
        `kept_bytes`."""

    def exchange_bytes(self, numel: int, weights_bytes: int, ranks: int) -> int:
        """Bytes on the accelerator of an exchange of changed weights alone at stages 1 and 2; 0: the rule has none.

        Args:
            numel: elements of the partition, n.
            weights_bytes: bytes of an element of the weights.
            ranks: number of ranks.
        """


def arena_specs(settings: RuleSettings, numels: Sequence[int], publish_dtype: str, grad_dtype: str) -> list[ArraySpec]:
    """The arrays of all partitions. While the interval is open, only the first slot's memory is touched at start.

    Args:
        settings: settings of the rule.
        numels: elements of each partition.
        publish_dtype: dtype of y.
        grad_dtype: dtype in which gradients are handed over.
    """
    return [
        spec
        for index, numel in enumerate(numels)
        for spec in partition_specs(
            index,
            numel,
            block_size=settings.block_size,
            publish_dtype=publish_dtype,
            grad_dtype=grad_dtype,
            slots=settings.slots,
            touched_slots=1 if settings.update_interval is None else settings.slots,
            per_block=settings.per_block,
        )
    ]


def gradient_dtype(weights: str, accumulation: str) -> str:
    """The dtype in which gradients are handed over: the weights' dtype, or for fp16 weights the accumulation dtype.

    fp16 cannot represent gradients that were accumulated in fp32; bf16 has the range of fp32.
    """
    return accumulation if weights == "float16" else weights
