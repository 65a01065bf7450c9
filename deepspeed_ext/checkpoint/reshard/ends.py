"""The source and the target of a load, independent of DeepSpeed's files and optimizers: the
partitions in a checkpoint, and one rank's partitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deepspeed_ext.checkpoint.reshard.layout import Layout, Placement

__all__ = ["MASTER", "Source", "SourcePartitions", "Target"]

MASTER = "fp32"
"""Name of p among the tensors of a partition; the others are named as in the optimizer's state."""


class SourcePartitions(Protocol):
    """The partitions that one rank saved.

    Attributes:
        tensors: for each flat tensor, p and the optimizer's state per element, by name; 1-D. p may
            lack padding at its end.
        scalars: for each flat tensor, the rest of the optimizer's state, such as the step count.
        groups: the parameter groups of the optimizer; empty: not saved.
        group_of_flats: index of the parameter group of each flat tensor.
        path: the file, for messages.
    """

    path: str
    tensors: list[dict[str, torch.Tensor]]
    scalars: list[dict[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    group_of_flats: list[int]

    @property
    def scaler(self) -> dict[str, Any]:
        """State of the loss scale, under DeepSpeed's keys."""

    def require(self, flat: int, end: int) -> None:
        """Check that a flat tensor's `tensors` have `end` elements.

        Raises:
            CheckpointError: one has fewer.
        """

    def read(self, flat: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Elements `begin` to `end` of a flat tensor's `tensors`, after all gradients in the
        checkpoint.

        Raises:
            CheckpointError: the file is damaged.
        """


class Source(Protocol):
    """A checkpoint.

    Attributes:
        folder: where it is, for messages.
    """

    folder: str

    @property
    def layout(self) -> Layout:
        """Where the trained parameters lie in the ranks' partitions."""

    def partitions(self, rank: int) -> SourcePartitions:
        """The partitions that `rank` saved."""

    def frozen(self, name: str) -> Placement | None:
        """Where the elements of a frozen parameter lie; None: it was not saved."""

    def frozen_part(self, name: str, rank: int) -> torch.Tensor:
        """The elements of a frozen parameter that `rank` saved, 1-D."""


class Target(ABC):
    """One rank's partitions.

    Attributes:
        rank, ranks: this rank's number, and the number of ranks that share the parameters.
        layout: where the trained parameters lie.
    """

    rank: int
    ranks: int
    layout: Layout

    @property
    @abstractmethod
    def masters(self) -> list[torch.Tensor]:
        """p of each flat tensor, with padding; 1-D fp32, changed in place."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[int]:
        """Index of the parameter group of each flat tensor."""

    @property
    @abstractmethod
    def hyperparameters(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer, without parameters."""

    @abstractmethod
    def state(self, flat: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The optimizer's state tensor `name` for a flat tensor, with p's shape: the one in use, or
        new zeros."""

    @abstractmethod
    def numel(self, param: Any) -> int:
        """Elements of the whole parameter."""

    @abstractmethod
    def is_quantized(self, param: Any) -> bool:
        """Whether the parameter is stored quantized."""

    @abstractmethod
    def state_dict(self, base: dict[str, Any], scaler: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict that DeepSpeed would have saved for these partitions.

        Args:
            base: state dict of the optimizer that it wraps.
            scaler: state of the loss scale.
        """

    @abstractmethod
    def write_weights(self) -> None:
        """Write p to the model's weights. A collective."""

    @abstractmethod
    def frozen(self, param: Any) -> AbstractContextManager[tuple[torch.Tensor, int, int]]:
        """Context with this rank's elements of a frozen parameter, 1-D, and their range. What the
        block writes to them is stored in the parameter."""
