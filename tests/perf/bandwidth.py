"""What this machine's memory and link can carry: the ceilings that copies are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator


def measure(mib: int, repeats: int = 7) -> dict[str, float]:
    """Body of a rank: GB/s of large copies, medians; a copy within one memory counts the bytes read
    and written.

    ``host``: within host memory by this rank's threads; with an accelerator also ``device``, and
    over the link ``down`` and ``up`` (page-locked), ``pageable down``, ``pageable up``.
    """
    accelerator = get_accelerator()
    source = torch.randn(mib * 2**18)  # zeros would be copied faster
    pageable = torch.empty_like(source)
    found = {"host": _gb_per_second(lambda: pageable.copy_(source), 2 * source.nbytes, repeats)}
    if accelerator.device_name() == "cpu":
        return found
    pinned = accelerator.pin_memory(torch.empty_like(source))
    device = source.to(accelerator.current_device_name())
    other = torch.empty_like(device)
    copies: dict[str, tuple[Callable[[], object], int]] = {
        "device": (lambda: other.copy_(device), 2),
        "down": (lambda: pinned.copy_(device, non_blocking=True), 1),
        "up": (lambda: device.copy_(pinned, non_blocking=True), 1),
        "pageable down": (lambda: pageable.copy_(device), 1),
        "pageable up": (lambda: device.copy_(pageable), 1),
    }
    return found | {
        name: _gb_per_second(copy, n * source.nbytes, repeats) for name, (copy, n) in copies.items()
    }


def _gb_per_second(copy: Callable[[], object], nbytes: int, repeats: int) -> float:
    synchronize = get_accelerator().synchronize
    seconds = []
    for turn in range(-2, repeats):
        synchronize()
        begin = time.perf_counter()
        copy()
        synchronize()
        if turn >= 0:
            seconds.append(time.perf_counter() - begin)
    return nbytes / statistics.median(seconds) / 1e9
