"""One rank's partitions as places to load a checkpoint into, independent of the optimizer that owns them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed_ext.checkpoint.reshard.layout import Layout

__all__ = ["Target"]


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
        """The optimizer's tensor of that name for a flat tensor, with p's shape: the one in use, or a new one of
        zeros."""

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
        """This rank's elements of a parameter that is not trained, 1-D, and the range of these elements. Values that
        the block writes to them are stored in the parameter."""
