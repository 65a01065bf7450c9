"""Moves the data of device tensors to the host for a while; the tensor objects stay the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Parked"]


class Parked:
    """Tensors whose data is on the host until `restore`.

    If the host has no memory for all of them, the constructor raises before any has moved.

    Args:
        tensors: none shares its memory with another tensor; tensors already on the host are not moved.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copies = [_on_host(tensor) for tensor in found]
        self._tensors = [(tensor, tensor.device) for tensor in found]
        for tensor, copy in zip(found, copies, strict=True):
            tensor.data = copy

    def restore(self) -> None:
        """Move all of them back to their devices. Idempotent; if device memory runs out, the rest stays on the host."""
        while self._tensors:
            tensor, device = self._tensors[-1]
            tensor.data = tensor.data.to(device)
            self._tensors.pop()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.to("cpu")
