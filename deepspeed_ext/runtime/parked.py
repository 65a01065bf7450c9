"""Keeps the bytes of device tensors on the host for a while; the tensors stay the objects that they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Parked"]


class Parked:
    """Tensors whose data is on the host until `restore`.

    If the host has no memory for all of them, the error comes before any has moved.

    Args:
        tensors: each the only one that uses its memory; those that are on the host already are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copies = [_on_host(tensor) for tensor in found]
        self._tensors = [(tensor, tensor.device) for tensor in found]
        for tensor, copy in zip(found, copies, strict=True):
            tensor.data = copy

    def restore(self) -> None:
        """Move all of them back to where they were. Idempotent; if device memory runs out, the rest stays parked."""
        while self._tensors:
            tensor, device = self._tensors[-1]
            tensor.data = tensor.data.to(device)
            self._tensors.pop()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.to("cpu")
