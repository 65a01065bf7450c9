"""The largest amount of host memory that a process has held since a moment, as the kernel counts
it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class HostPeak:
    """Growth of this process's resident memory from here to its peak.

    The kernel keeps the peak itself (VmHWM) and forgets it when 5 is written to clear_refs
    (proc(5)), so nothing is sampled and no peak is missed. Pages that a driver has mapped for
    page-locked memory may or may not be in it: `pinned` gives torch's own count of those.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
        except OSError:  # no such file, or a sandbox that does not have it
            self._before = None

    @property
    def nbytes(self) -> int | None:
        """Bytes by which the peak is above the start; None where the kernel does not tell."""
        peak = _status("VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def pinned() -> int | None:
    """The most page-locked bytes that torch's allocator has held since `forget_pinned`; None if it
    does not count."""
    stats = getattr(_device_module(), "host_memory_stats", None)
    return None if stats is None else int(stats().get("allocated_bytes.peak", 0))


def forget_pinned() -> None:
    """Let `pinned` begin anew with what is held now."""
    getattr(_device_module(), "reset_peak_host_memory_stats", lambda: None)()


def _device_module() -> Any:
    name = get_accelerator().device_name()
    return None if name == "cpu" else torch.get_device_module(name)


def _status(name: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
