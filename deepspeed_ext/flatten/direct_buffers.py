"""Allocates the buffers of the stage 1/2 constructor without temporary copies.

DeepSpeed makes them by ``partition.detach().clone().to(device, dtype)`` and then ``pin_memory``.
With CPU offload, this clones the partition, makes an fp32 copy of it on the accelerator, transfers
that to pageable memory, and copies it on the host for page-locking. The constructor has no method
to override, so `DirectBuffers` intercepts torch calls while it runs. Nor has the constructor of
stage 3, where `NoMasters` leaves out the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.start_profile import StartupProfile

__all__ = ["DirectBuffers", "NoMasters"]


def _is_for_host(device: Any) -> bool:
    """Whether a torch factory function called with `device` allocates on the host."""
    return (torch.get_default_device() if device is None else torch.device(device)).type == "cpu"


class DirectBuffers(TorchFunctionMode):
    """While active, makes each master partition with a single copy, and allocates zero buffers
    page-locked at once.

    Args:
        pin: whether to page-lock the offloaded optimizer's buffers.
        startup: profile that counts the time and the bytes.
        makes_masters: false if DeepSpeed's masters are never read. They are then meta tensors, with
            sizes and no memory, and so is the 16-bit buffer that DeepSpeed makes beside each.
    """

    def __init__(self, pin: bool, startup: StartupProfile, *, makes_masters: bool = True) -> None:
        super().__init__()
        self._pin = pin and allocation.can_page_lock()
        self._startup = startup
        self._makes_masters = makes_masters
        self._partition: torch.Tensor | None = None
        self._rests = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Intercept nothing inside the block, which runs collectives: these allocate tensors, too,
        and an error on one rank would leave the others waiting."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def expect_master_of(self, partition: torch.Tensor) -> None:
        """Expect the constructor to clone and convert `partition` (1-D, a view of the flat buffer)
        next."""
        assert self._partition is None, (
            "the constructor did not make a master of the previous partition"
        )
        self._partition = partition

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert error[0] is not None or self._partition is None, (
            "the constructor did not make a master of the last partition"
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._rests:
            return func(*args, **kwargs)
        if func is torch.Tensor.clone and self._is_partition(args[0]):
            return args[0]  # `to` below makes the only copy
        if func is torch.Tensor.to and self._is_partition(args[0]):
            partition, self._partition = args[0], None
            return self._master(partition, torch.device(kwargs["device"]), kwargs["dtype"])
        if func in (torch.zeros, torch.full) and self._pin and _is_for_host(kwargs.get("device")):
            return self._page_locked(
                func(*args, **{**kwargs, "device": "meta"}), kwargs.get("fill_value", 0)
            )
        return func(*args, **kwargs)

    def _is_partition(self, tensor: torch.Tensor) -> bool:
        expected = self._partition
        return expected is not None and (
            (tensor.data_ptr(), tensor.numel(), tensor.dtype)
            == (expected.data_ptr(), expected.numel(), expected.dtype)
        )

    def _master(
        self, partition: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """Copy `partition` to `device` in `dtype`; on the host page-locked if requested, without a
        second copy."""
        if not self._makes_masters:
            return torch.empty_like(partition, dtype=dtype, device="meta")
        with self._startup.phase("master partition", partition.numel() * dtype.itemsize):
            if device.type == partition.device.type:
                return torch.empty_like(partition, dtype=dtype).copy_(partition)
            master = allocation.host_empty(partition.numel(), dtype, self._pin)
            Staging(partition.dtype).to_host(partition, master)
            return master

    def _page_locked(self, like: torch.Tensor, value: float) -> torch.Tensor:
        with self._startup.phase("page-locked buffers", like.nbytes):
            return (
                allocation.host_empty(like.numel(), like.dtype, pin=True)
                .view(like.shape)
                .fill_(value)
            )


class NoMasters(TorchFunctionMode):
    """While active, ``to`` of `partitions` returns meta tensors, with sizes and no memory.

    Args:
        partitions: tensors whose DeepSpeed masters are never read.
    """

    def __init__(self, partitions: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._partitions = partitions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and any(args[0] is partition for partition in self._partitions):
            return torch.empty_like(args[0], dtype=kwargs["dtype"], device="meta")
        return func(*args, **kwargs)
