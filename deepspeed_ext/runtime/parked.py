"""Moves the data of device tensors to the host for a while; the tensor objects stay the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_ext.runtime import memory

__all__ = ["Parked"]


class Parked:
    """Tensors whose data is on the host until `restore`.

    If the host has no memory for all of them, the constructor raises before any has moved.

    Args:
        tensors: tensors without shared memory, and no views, whose bases would keep it. One object
            may come twice; tensors already on the host are not moved.
        unused: tensors whose values are no longer needed: their memory is freed without a copy, and
            is uninitialized after `restore`.
        pins: whether the copies are page-locked, if possible.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        unused: Iterable[torch.Tensor] = (),
        *,
        pins: bool = False,
    ) -> None:
        found = {id(tensor): tensor for tensor in tensors if tensor.device.type != "cpu"}
        copies = [_on_host(tensor, pins) for tensor in found.values()]
        self._tensors = [(tensor, tensor.device) for tensor in found.values()]
        self._unused = [(tensor, tensor.data.to("meta")) for tensor in unused]
        for tensor, copy in zip(found.values(), copies, strict=True):
            tensor.data = copy
        for tensor, _ in self._unused:
            tensor.data = tensor.data.new_empty(0)

    def restore(self) -> None:
        """Move all of them back to their devices. Idempotent; if device memory runs out, the rest
        stays on the host."""
        while self._tensors:
            tensor, device = self._tensors[-1]
            tensor.data = tensor.data.to(device)
            self._tensors.pop()
        while self._unused:
            tensor, shape = self._unused[-1]
            tensor.data = torch.empty_like(shape, device=tensor.device)
            self._unused.pop()


def _on_host(tensor: torch.Tensor, pins: bool) -> torch.Tensor:
    if not pins or not tensor.is_contiguous():
        return tensor.data.to("cpu")
    copy = memory.host_empty(tensor.numel(), tensor.dtype, pin=True)
    return copy.view(tensor.shape).copy_(tensor.data)
