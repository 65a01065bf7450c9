"""Measures accelerator memory and allocates buffers on the accelerator and the host.

Free accelerator memory is what this process can allocate: the device's free memory plus unused
memory of the caching allocator. It does not come from the management library (NVML), which ignores
device masks, MIG slices and this process's cache. On the CPU accelerator, all ranks of a host
allocate at the same time from what is available within the control group's limit, so each has an
equal share of it.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from deepspeed_ext.runtime.backend import get_accelerator, local_world_size, pinned_empty
from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.proc import available_host_bytes, total_host_bytes
from deepspeed_ext.runtime.ranks import RankGroup, raise_together
from deepspeed_ext.runtime.timing import in_profile

T = TypeVar("T")

_REFUSALS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)


def free_accelerator_bytes() -> int:
    """The bytes that this process can allocate now on its current device."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return available_host_bytes() // local_world_size()
    info = getattr(torch.get_device_module(accelerator.device_name()), "mem_get_info", None)
    if info is None:
        return int(accelerator.available_memory())
    free, _ = info()
    return int(free) + int(accelerator.memory_reserved()) - int(accelerator.memory_allocated())


def unused_accelerator_bytes() -> int:
    """The bytes of accelerator memory that were free at this process's peak so far; on the CPU 0,
    because they are not known."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return 0
    beyond_now = int(accelerator.max_memory_allocated()) - int(accelerator.memory_allocated())
    return max(0, free_accelerator_bytes() - beyond_now)


def total_accelerator_bytes() -> int:
    """The bytes of memory of the current device; on the CPU accelerator, this rank's share."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return total_host_bytes() // local_world_size()
    return int(accelerator.total_memory())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation, on an accelerator or on the host, page-locked or not.
    For errors of the accelerator's runtime, such as ``CUDA error: out of memory`` for page-locked
    memory, torch has no type of their own, so their text is read."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _REFUSALS
    )


def accelerator_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised 1-D tensor of `numel` elements on `device`."""
    return torch.empty(numel, dtype=dtype, device=device)


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Allocate an uninitialised 1-D tensor of `numel` elements in host memory, with `pin`
    page-locked. If that fails, which happens long before the host is full, the tensor is pageable,
    with one warning: copies are then slower and synchronous."""
    buffer = _page_locked(numel, dtype) if pin else None
    return torch.empty(numel, dtype=dtype, device="cpu") if buffer is None else buffer


def _page_locked(numel: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Allocate an uninitialised 1-D page-locked tensor; None if it does not fit."""
    try:
        return pinned_empty(get_accelerator(), numel, dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    warn_once(
        "host memory could not be page-locked, so copies to and from the accelerator are slower. "
        "Raise the limit on locked memory (ulimit -l, --ulimit memlock=-1) or free host memory"
    )
    return None


@functools.cache
def can_page_lock() -> bool:
    """Whether the accelerator page-locks host memory; the CPU accelerator usually does not."""
    probe = _page_locked(1, torch.uint8)
    return probe is not None and bool(get_accelerator().is_pinned(probe))


def try_on_all_ranks(name: str, attempt: Callable[[], T], ranks: RankGroup) -> T | None:
    """Call `attempt`, which must contain no collective, on every rank, in a profile's range `name`.
    Return its result; None on all ranks if any rank ran out of memory. A collective.

    Raises:
        DeepSpeedExtError: on every rank, if `attempt` raised another error on any rank.
    """
    result, error, refused = None, None, False
    try:
        with in_profile(name):
            result = attempt()
    except Exception as caught:
        if is_out_of_memory(caught):
            refused = True
        else:
            error = caught
    return None if raise_together(ranks, error, flag=refused) else result


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
    copy = host_empty(tensor.numel(), tensor.dtype, pin=True)
    return copy.view(tensor.shape).copy_(tensor.data)
