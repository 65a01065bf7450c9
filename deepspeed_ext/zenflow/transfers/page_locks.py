"""Page-locks memory that the accelerator's runtime did not allocate, and never unmaps it while it is locked."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext.runtime.backend import can_register_host_memory, get_accelerator
from deepspeed_ext.runtime.log import warn_once

__all__ = ["PageLocks"]

_left: list[Any] = []
"""Objects kept in memory until the process ends."""


class PageLocks:
    """Page-locked parts of the host's memory.

    If memory were unmapped while it is page-locked, later mappings at its address would count as page-locked. So memory
    that is never passed to `unlock` stays locked and mapped until the process ends.
    """

    def __init__(self) -> None:
        self._locked: dict[int, torch.Tensor] = {}  # by the address of the first page
        self._owner_pid = os.getpid()
        weakref.finalize(self, _leave, self._locked).atexit = False

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock existing host tensors, so that their copies run in parallel with computation. Idempotent.

        If the system refuses (``ulimit -l``), or the accelerator cannot do it, a warning is logged: copies then go
        through pageable memory, slower and synchronously.

        Args:
            tensors: must not share a page with other locked memory.
        """
        accelerator = get_accelerator()
        if accelerator.is_synchronized_device():
            return
        for tensor in tensors:
            begin = tensor.data_ptr() // accelerator.pin_memory_alignment() * accelerator.pin_memory_alignment()
            if tensor.numel() == 0 or begin in self._locked:
                continue
            if not _is_registered(begin, tensor.data_ptr() + tensor.nbytes - begin):
                remedy = "Raise the limit on locked memory (ulimit -l, --ulimit memlock=-1)"
                if not can_register_host_memory():
                    remedy = f"DeepSpeed's accelerator {accelerator.device_name()!r} has no register_host_memory"
                warn_once(
                    f"{tensor.nbytes:,} bytes of the optimizer's memory could not be page-locked: copies to and from "
                    f"the accelerator are slower. {remedy}"
                )
                return
            self._locked[begin] = tensor

    def unlock(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Undo `lock` of these tensors; None: of all. No copy to or from them may be running. Idempotent."""
        if os.getpid() != self._owner_pid:  # a forked process must not use the accelerator
            return
        chosen = None if tensors is None else {tensor.data_ptr() for tensor in tensors}
        for begin, tensor in list(self._locked.items()):
            if chosen is None or tensor.data_ptr() in chosen:
                if not _succeeds(lambda begin=begin: get_accelerator().unregister_host_memory(begin)):
                    _left.append(tensor)
                del self._locked[begin]

    def leave(self, *others: object) -> None:
        """Keep all of it locked, and `others` in memory, until the process ends, because copies may still run."""
        _leave(self._locked)
        self._locked.clear()
        _left.extend(others)


def _leave(locked: dict[int, torch.Tensor]) -> None:
    _left.extend(locked.values())


def _is_registered(address: int, nbytes: int) -> bool:
    """Page-lock memory; return whether that succeeded."""
    registered: list[Any] = []
    _succeeds(lambda: registered.append(get_accelerator().register_host_memory(address, nbytes)))
    return any(registered)


def _succeeds(call: Any) -> bool:
    """Whether a call of the accelerator's runtime raises no error; clears its error if it does.

    The runtime keeps the error of a refused call and reports it at the next kernel launch check, wherever that is.
    torch has no function to clear it, but launching a kernel through torch does.
    """
    try:
        call()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
        return False
    return True
