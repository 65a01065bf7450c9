"""Copies between the accelerator and the arena, beside the computation where the accelerator has streams."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ext._logging import warn_once
from deepspeed_ext._upstream import get_accelerator

__all__ = ["Streamed", "Transfers"]


@dataclass
class Streamed:
    """Which parts of a gradient are on their way to the host before its step.

    Attributes:
        parts: their sizes in elements, by where they begin.
        wanted: elements that must be on their way for the gradient to be complete; the rest is padding.
    """

    parts: dict[int, int] = field(default_factory=dict)
    wanted: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to copy."""
        return bool(self.parts) and sum(self.parts.values()) >= self.wanted


class Transfers:
    """Gradients go down on a stream of their own; `finish` returns when everything has arrived.

    On an accelerator without streams (the CPU) copies are done when the calls return.
    """

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._locked: dict[int, torch.Tensor] = {}  # by address
        # Memory that is unmapped while it is page-locked would count as page-locked, whatever is mapped there later.
        # The finalizer's arguments keep the mapping alive until it has run.
        weakref.finalize(self, _unlock, self._locked, os.getpid())
        self._newest: Any = None  # copy -> wait_for_older: recorded behind the newest copy of `to_host`
        self._older: Any = None  # the same of the copy before it

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying `source` (accelerator) to `target` (arena); both stay as they are until `finish`."""
        if self._stream is None:
            target.copy_(source)
            return
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        self._older, self._newest = self._newest, accelerator.Event()
        self._newest.record(self._stream)

    def wait_for_older(self) -> None:
        """Wait for all copies of `to_host` but the newest, so that their sources' memory can be used again."""
        if self._older is not None:
            self._older.synchronize()
            self._older = None

    def finish(self) -> None:
        """Wait for the copies of `to_host`, and for those that the current stream makes from the arena."""
        if self._stream is not None:
            self._stream.synchronize()
            get_accelerator().current_stream().synchronize()

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock host tensors that exist already, so that copies of them run beside the computation. Idempotent.

        Refusal (``ulimit -l``) is a warning: copies then go through pageable memory, slower and in step.
        """
        runtime = _host_registry()
        for tensor in tensors if runtime is not None else ():
            if tensor.numel() == 0 or tensor.data_ptr() in self._locked:
                continue
            if not _succeeded(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
                warn_once(
                    f"{tensor.nbytes:,} bytes of the optimizer's arena could not be page-locked: copies to and from "
                    "the accelerator are slower. Raise the limit on locked memory (ulimit -l, --ulimit memlock=-1)"
                )
                return
            self._locked[tensor.data_ptr()] = tensor

    def unlock(self) -> None:
        """Wait for every copy, and undo `lock`. Idempotent."""
        _unlock(self._locked, os.getpid())


def _unlock(locked: dict[int, torch.Tensor], owner_pid: int) -> None:
    """Order: copies end, then pages are unlocked, then the last reference to the mapping may go."""
    if not locked or os.getpid() != owner_pid:  # the accelerator is not a forked process's
        return
    try:
        get_accelerator().synchronize()
    finally:
        runtime = _host_registry()
        while locked:
            address, _mapped = locked.popitem()
            _succeeded(runtime.cudaHostUnregister(address))


def _succeeded(status: Any) -> bool:
    """Whether a call of the runtime succeeded. If not, nothing is left of its error.

    The runtime keeps the error of a refused call, and raises it at the next check of a kernel that was launched,
    wherever that is. torch has no function that takes it away; but launching a kernel through torch does.
    """
    if int(status) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
    return False


def _host_registry() -> Any:
    """The accelerator runtime's functions for page-locking memory that it did not allocate; None where it has none."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    runtime = getattr(torch.get_device_module(accelerator.device_name()), "cudart", None)
    return None if runtime is None else runtime()
