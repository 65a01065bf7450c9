"""How long an accelerator does nothing, and what crosses its link, by torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity

KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class DeviceUse:
    """What a device did between the first and the last thing that it did.

    Attributes:
        seconds: from first to last.
        compute_idle: share of them in which no kernel ran.
        idle: share in which neither a kernel nor a copy ran.
        bytes_down, bytes_up: copied to the host and from it; None if the trace does not say.
    """

    seconds: float
    compute_idle: float
    idle: float
    bytes_down: int | None
    bytes_up: int | None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of `spans`, each a begin and an end."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def device_use(events: Sequence[dict[str, Any]]) -> DeviceUse | None:
    """The use that the events of a Chrome trace tell of (times in microseconds); None if they name
    no device work."""
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == KERNEL]
    copies = [e for e in events if e.get("cat") in COPIES]
    spans = kernels + [(e["ts"], e["ts"] + e["dur"]) for e in copies]
    if not kernels:
        return None
    length = max(end for _, end in spans) - min(begin for begin, _ in spans)
    down, up = (_copied(copies, way) for way in ("DtoH", "HtoD"))
    return DeviceUse(
        length / 1e6, 1 - covered(kernels) / length, 1 - covered(spans) / length, down, up
    )


def _copied(copies: Sequence[dict[str, Any]], way: str) -> int | None:
    sizes = [e.get("args", {}).get("bytes") for e in copies if way in e.get("name", "")]
    return None if any(size is None for size in sizes) else sum(sizes)


def profiled(work: Callable[[], None]) -> DeviceUse | None:
    """Run `work` under the profiler; None where the accelerator is the CPU or has no profiler."""
    name = get_accelerator().device_name()
    activity = getattr(ProfilerActivity, name.upper(), None)
    if name == "cpu" or activity is None:
        work()
        return None
    get_accelerator().synchronize()
    # without the CPU's activities: less overhead
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        get_accelerator().synchronize()
    with tempfile.TemporaryDirectory(prefix="dsext-trace-") as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return device_use(json.loads(path.read_text())["traceEvents"])
