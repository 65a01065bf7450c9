"""Copies between accelerator and pageable host memory through two page-locked chunks, and makes the
masters of DeepSpeed's constructors by them.

A transfer from pageable memory is several times slower than one from page-locked memory, and
page-locking a whole buffer costs more than copying it once. So the accelerator transfers one chunk
while the CPU copies the other.

DeepSpeed's stage 1/2 constructor makes its buffers by
``partition.detach().clone().to(device, dtype)`` and then ``pin_memory``: with CPU offload, it
clones the partition, makes an fp32 copy of it on the accelerator, transfers that to pageable
memory, and copies it on the host for page-locking. The constructor has no method to override, so
`DirectBuffers` intercepts torch calls while it runs. Nor has the constructor of stage 3, where
`NoMasters` leaves out the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator


class Staging:
    """Two chunks of host memory that transfers use alternately, page-locked if the accelerator
    can."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.numel = max(1, STAGING_CHUNK_BYTES // dtype.itemsize)
        self._dtype = dtype
        self._chunks: list[torch.Tensor] = []
        self._events: list[Any] = [None, None]

    def reserve(self, numel: int) -> None:
        """Allocate the chunks for transfers of `numel` elements, so that a lack of memory shows
        here and not later."""
        if not self._chunks:
            size = min(self.numel, max(1, numel))  # of nothing, too: a later transfer has elements
            self._chunks = [allocation.host_empty(size, self._dtype, pin=True) for _ in range(2)]

    def _parts(self, numel: int) -> list[tuple[int, int, torch.Tensor]]:
        """A transfer's parts: index of the chunk, first element, and chunk cut to the length."""
        self.reserve(numel)
        step = self._chunks[0].numel()
        starts = range(0, numel, step)
        return [
            (part % 2, start, self._chunks[part % 2][: min(step, numel - start)])
            for part, start in enumerate(starts)
        ]

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, accelerator) into `target` (1-D, host, any dtype)."""
        self.pack_to_host(
            lambda out, start: out.copy_(source[start : start + out.numel()], non_blocking=True),
            target,
        )

    def pack_to_host(self, pack: Callable[[torch.Tensor, int], Any], target: torch.Tensor) -> None:
        """Fill `target` (1-D, host) in chunks; ``pack(out, start)`` writes the elements from
        `start` into `out`."""
        pending: tuple[int, int, torch.Tensor] | None = None
        for part in self._parts(target.numel()):
            pack(part[2], part[1])
            self._record(part[0])
            if pending is not None:
                self._store(pending, target)
            pending = part
        if pending is not None:
            self._store(pending, target)

    def _store(self, part: tuple[int, int, torch.Tensor], target: torch.Tensor) -> None:
        chunk_index, start, chunk = part
        self._wait(chunk_index)
        target[start : start + chunk.numel()].copy_(chunk)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (1-D, host) into `target` (1-D, accelerator)."""
        for chunk_index, start, chunk in self._parts(target.numel()):
            # the previous transfer from this chunk to the accelerator must be complete
            self._wait(chunk_index)
            chunk.copy_(source[start : start + chunk.numel()])
            target[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
            self._record(chunk_index)

    def _record(self, chunk_index: int) -> None:
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            self._events[chunk_index] = accelerator.Event()
            self._events[chunk_index].record(accelerator.current_stream())

    def _wait(self, chunk_index: int) -> None:
        if self._events[chunk_index] is not None:
            self._events[chunk_index].synchronize()
            self._events[chunk_index] = None


class DirectBuffers(TorchFunctionMode):
    """While active, makes each master partition with a single copy, and allocates zero buffers
    page-locked at once.

    Args:
        pin: whether to page-lock the offloaded optimizer's buffers.
        makes_masters: false if DeepSpeed's masters are never read. They are then meta tensors, with
            sizes and no memory, and so is the 16-bit buffer that DeepSpeed makes beside each.
    """

    def __init__(self, pin: bool, *, makes_masters: bool) -> None:
        super().__init__()
        self._pin = pin and allocation.can_page_lock()
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
        if func in (torch.zeros, torch.full) and self._pin:
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            if device.type == "cpu":
                like = func(*args, **{**kwargs, "device": "meta"})
                buffer = allocation.host_empty(like.numel(), like.dtype, pin=True)
                return buffer.view(like.shape).fill_(kwargs.get("fill_value", 0))
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
        if device.type == partition.device.type:
            return torch.empty_like(partition, dtype=dtype).copy_(partition)
        master = allocation.host_empty(partition.numel(), dtype, self._pin)
        Staging(partition.dtype).to_host(partition, master)
        return master


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
