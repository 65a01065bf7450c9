"""Page-locks memory that the accelerator's runtime did not allocate, and never unmaps it while it is locked."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import warn_once

__all__ = ["PageLocks"]


class PageLocks:
    """The page-locked parts of the arena. Unlocks them at `unlock`, at garbage collection and at interpreter exit."""

    def __init__(self) -> None:
        self._locked: dict[int, torch.Tensor] = {}  # by address
        # If memory were unmapped while page-locked, later mappings at its address would count as page-locked.
        # The finalizer's arguments keep the mapping alive until the finalizer has run.
        weakref.finalize(self, _unlock, self._locked, os.getpid())

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
