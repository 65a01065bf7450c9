"""Keeps the bytes of device tensors on the host for a while; the tensors stay the objects that they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Parked"]


class Parked:
    """Tensors whose data is on the host until `restore`.

    Args:
        tensors: each the only one that uses its memory; those that are on the host already are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [(tensor, tensor.device) for tensor in tensors if tensor.device.type != "cpu"]
        for tensor, _ in self._tensors:
            tensor.data = tensor.data.to("cpu")

    def restore(self) -> None:
        """Move all of them back to where they were. Idempotent."""
        while self._tensors:
            tensor, device = self._tensors.pop()
            tensor.data = tensor.data.to(device)
