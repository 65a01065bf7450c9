"""Copies between accelerator and arena, in parallel with computation if the accelerator has streams."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext._logging import warn_once
from deepspeed_ext._upstream import get_accelerator

__all__ = ["Transfers"]


class Transfers:
    """Copies gradients to the host on a dedicated stream; `finish` returns once everything has arrived.

    On an accelerator without streams (the CPU), copies are done when the calls return.
    """

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._locked: dict[int, torch.Tensor] = {}  # by address
        # If memory were unmapped while page-locked, later mappings at its address would count as page-locked.
        # The finalizer's arguments keep the mapping alive until the finalizer has run.
        weakref.finalize(self, _unlock, self._locked, os.getpid())
        self._newest: Any = None  # to_host -> wait_for_older: recorded after the newest copy
        self._older: Any = None  # the same for the copy before it

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying to the host. Neither tensor may change until `finish`.

        Args:
            source: on the accelerator.
            target: same shape and dtype, in the arena.
        """
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
        """Wait for all copies of `to_host` except the newest, so that the memory of their sources can be reused."""
        if self._older is not None:
            self._older.synchronize()
            self._older = None

    def finish(self) -> None:
        """Wait for all copies of `to_host`, and for the current stream's copies from the arena."""
        if self._stream is not None:
            self._stream.synchronize()
            get_accelerator().current_stream().synchronize()

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock existing host tensors, so that their copies run in parallel with computation. Idempotent.

        If the system refuses (``ulimit -l``), a warning is logged: copies then go through pageable memory, slower and
        synchronously.
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
        """Wait for every copy and undo `lock`. Idempotent."""
        _unlock(self._locked, os.getpid())


def _unlock(locked: dict[int, torch.Tensor], owner_pid: int) -> None:
    """Wait for copies, then unlock pages, then drop the last references to the mapping; the order matters."""
    if not locked or os.getpid() != owner_pid:  # a forked process must not use the accelerator
        return
    try:
        get_accelerator().synchronize()
    finally:
        runtime = _host_registry()
        while locked:
            address, _mapped = locked.popitem()
            _succeeded(runtime.cudaHostUnregister(address))


def _succeeded(status: Any) -> bool:
    """Whether a call of the accelerator's runtime succeeded; clears its error if not.

    The runtime keeps the error of a refused call and reports it at the next kernel launch check, wherever that is.
    torch has no function to clear it, but launching a kernel through torch does.
    """
    if int(status) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
    return False


def _host_registry() -> Any:
    """The runtime's functions for page-locking memory that it did not allocate; None if it has none."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    runtime = getattr(torch.get_device_module(accelerator.device_name()), "cudart", None)
    return None if runtime is None else runtime()
