"""The page-locked host memory that torch's allocator has held since a moment."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


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
