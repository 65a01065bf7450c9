"""Measures accelerator memory, allocates buffers on the accelerator and the host, and page-locks
memory that the accelerator's runtime did not allocate.

Free accelerator memory is what this process can allocate: the device's free memory plus unused
memory of the caching allocator. It does not come from the management library (NVML), which ignores
device masks, MIG slices and this process's cache. On the CPU accelerator, all ranks of a host
allocate at the same time from what is available within the control group's limit, so each has an
equal share of it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from deepspeed_ext.runtime.backend import (
    SHARED_MEMORY,
    can_register_host_memory,
    get_accelerator,
    has_host_memory,
    local_world_size,
    page_lock_alignment,
    pinned_empty,
)
from deepspeed_ext.runtime.log import one_line, warn_once
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
        self, tensors: Iterable[torch.Tensor], unused: Iterable[torch.Tensor] = (), *, pins: bool
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


# -- page-locking what there is --------------------------------------------------------------------

_left: list[Any] = []
"""Objects kept in memory until the process ends."""


class PageLocks:
    """Host memory that this object has page-locked.

    If memory were unmapped while page-locked, later mappings at its address would count as
    page-locked. So memory that is not passed to `unlock` stays locked and mapped until the process
    ends.
    """

    def __init__(self) -> None:
        self._locked: dict[int, torch.Tensor] = {}  # by the address of the first page
        self._owner_pid = os.getpid()
        weakref.finalize(self, _leave, self._locked).atexit = False

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock existing host tensors, so that their copies run in parallel with computation.
        Idempotent.

        If the system refuses (``ulimit -l``), or the accelerator cannot do it, a warning is logged:
        copies then go through pageable memory, slower and synchronously.

        Args:
            tensors: must not share a page with other locked memory.
        """
        accelerator = get_accelerator()
        if accelerator.is_synchronized_device():
            return
        alignment = page_lock_alignment(accelerator)
        for tensor in tensors:
            begin = tensor.data_ptr() // alignment * alignment
            if tensor.numel() == 0 or begin in self._locked:
                continue
            nbytes = tensor.data_ptr() + tensor.nbytes - begin
            if (error := _refusal(begin, nbytes)) is not None:
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit = None if soft == resource.RLIM_INFINITY else soft
                name = accelerator.device_name() if not can_register_host_memory() else None
                remedy = remedy_for_refused(error, limit, has_host_memory(), without=name)
                warn_once(
                    f"{tensor.nbytes:,} bytes of the optimizer's memory could not be page-locked: "
                    f"copies take 3 to 6 times as long (an H200's), and steps wait. {remedy}"
                )
                return
            self._locked[begin] = tensor

    def unlock(self) -> None:
        """Undo `lock`. No copy to or from the memory may be running. Idempotent."""
        if os.getpid() != self._owner_pid:  # a forked process must not use the accelerator
            return
        for begin in list(self._locked):
            unlock = partial(get_accelerator().unregister_host_memory, begin)
            refused = _error_of(unlock) is not None
            tensor = self._locked.pop(begin)
            if refused:
                _left.append(tensor)

    def leave(self, *others: object) -> None:
        """Keep everything locked, and `others` alive, until the process ends, because copies may
        still run."""
        _leave(self._locked)
        self._locked.clear()
        _left.extend(others)


def _leave(locked: dict[int, torch.Tensor]) -> None:
    _left.extend(locked.values())


def remedy_for_refused(
    error: str, limit: int | None, is_host_memory: bool, *, without: str | None = None
) -> str:
    """Say why memory could not be page-locked, and what to change. A pure function.

    Args:
        error: the accelerator runtime's error.
        limit: bytes that this process may lock; None: unlimited.
        is_host_memory: whether the accelerator's memory is the host's.
        without: name of DeepSpeed's accelerator, if its class cannot lock memory at all.
    """
    if without is not None:
        return f"DeepSpeed's accelerator {without!r} has no register_host_memory"
    if is_host_memory:
        return (
            f"The accelerator's memory is the host's ({error}), "
            f"so offload frees nothing: {SHARED_MEMORY}"
        )
    if limit is not None:
        return (
            f"Raise the limit on locked memory, {limit:,} bytes (ulimit -l, --ulimit memlock=-1). "
            f"The runtime said: {error}"
        )
    return (
        f"The limit on locked memory is not the cause; this driver or runtime refuses it: {error}"
    )


def _refusal(address: int, nbytes: int) -> str | None:
    """Page-lock memory; return the error, or None."""
    registered: list[Any] = []
    error = _error_of(
        lambda: registered.append(bool(get_accelerator().register_host_memory(address, nbytes)))
    )
    return error if error is not None or any(registered) else "it was not registered"


def _error_of(call: Any) -> str | None:
    """The error that a call of the accelerator's runtime raises, or None; clears it in the runtime.
    A runtime without such a call raises an `AttributeError`.

    The runtime would report the error of a refused call again at the next check of a kernel launch,
    wherever that is. torch has no function to clear it, but launching a kernel through torch does.
    """
    try:
        call()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
        return one_line(error)
    return None
