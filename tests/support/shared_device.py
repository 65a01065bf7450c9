"""Several ranks on one device, where a machine has fewer devices than a test has ranks.

They talk through NCCL if `nccl_probe` says that this works here, otherwise through gloo. The probe
runs once for each number of ranks and machine; its verdict lies in a file that all processes of the
machine read. A test that hangs through NCCL is noted there, too: after `MOST_HANGS` of them the
rest runs through gloo, so that a hang costs one test its time and not the run. The variable
DSEXT_TEST_SHARED_BACKEND ("nccl" or "gloo") decides instead of the probe.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import nccl_probe
from tests.support.nccl_probe import Probed

__all__ = [
    "BACKEND",
    "MOST_SECONDS",
    "Backend",
    "backend_between",
    "environment",
    "note_hang",
    "share_devices",
]

BACKEND = "DSEXT_TEST_BACKEND"
"""Of a rank: the backend of its process group."""
GIVEN = "DSEXT_TEST_SHARED_BACKEND"
MOST_HANGS = 2
MOST_SECONDS = 100.0
"""Of a test through NCCL on a shared device: it may hang for reasons that are NVIDIA's."""


@dataclass(frozen=True)
class Backend:
    """What ranks that share a device talk through, and why."""

    name: str
    why: str


@dataclass
class _Known:
    """What is known of this machine."""

    machine: str
    probed: dict[str, Probed] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)


def _file() -> Path:
    return Path(tempfile.gettempdir(), f"dsext-shared-device-{os.getuid()}.json")


def _machine() -> str:
    """What a verdict holds for: the device, torch with its NCCL, and this start of the system."""
    device = (
        torch.get_device_module().get_device_name() if torch.accelerator.is_available() else "cpu"
    )
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{device}, torch {torch.__version__}, {started}"


@contextmanager
def _known() -> Iterator[_Known]:
    """What is known, kept afterwards; other processes wait meanwhile."""
    with open(_file(), "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        known = _Known(_machine())
        if kept.get("machine") == known.machine:
            known.probed = {ranks: Probed(**found) for ranks, found in kept["probed"].items()}
            known.hangs = kept["hangs"]
        yield known
        text = json.dumps(asdict(known))
        file.seek(0)
        file.truncate()
        file.write(text)


def backend_between(ranks: int) -> Backend:
    """Through which `ranks` ranks that share a device talk here; asks the probe if nobody has
    yet."""
    if given := os.environ.get(GIVEN):
        return Backend(given, f"{GIVEN} says so")
    with _known() as known:
        if str(ranks) not in known.probed:
            known.probed[str(ranks)] = nccl_probe.probe(ranks)
        return _judged(known.probed[str(ranks)], known.hangs)


def _judged(probed: Probed, hangs: list[str]) -> Backend:
    if len(hangs) >= MOST_HANGS:
        return Backend("gloo", f"tests through NCCL hung: {', '.join(hangs)}")
    return Backend("gloo" if probed.failed else "nccl", probed.says)


def note_hang(what: str) -> None:
    """A test of ranks that share a device through NCCL has not ended in its time."""
    with _known() as known:
        known.hangs.append(what)


def is_shared(ranks: int) -> bool:
    """Whether so many ranks are more than there are devices, of which there is one."""
    return torch.accelerator.is_available() and torch.accelerator.device_count() < ranks


def environment(rank: int, ranks: int) -> dict[str, str]:
    """What a rank's environment gets to share a device; empty if each rank has its own."""
    if not is_shared(ranks):
        return {}
    found = {BACKEND: backend_between(ranks).name}
    return found | (nccl_probe.environment(rank) if found[BACKEND] == "nccl" else {})


def share_devices() -> None:
    """Give local rank i the device i modulo the number of devices; DeepSpeed asks for device i."""
    import deepspeed.accelerator
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind: Any = type(accelerator)
    count = accelerator.device_count()

    # of an index, the same as text (LOCAL_RANK), or a torch.device
    def shared(device: Any) -> int | None:
        index = device.index if isinstance(device, torch.device) else device
        return None if index is None else int(index) % count

    class SharedDevices(kind):
        def set_device(self, device_index: Any) -> None:
            super().set_device(shared(device_index))

        def device_name(self, device_index: Any = None) -> str:
            return super().device_name(shared(device_index))

        def device(self, device_index: Any = None) -> Any:
            return super().device(shared(device_index))

    deepspeed.accelerator.set_accelerator(SharedDevices())


def summary() -> list[str]:
    """What has been found on this machine, in lines; asks nobody."""
    if not _file().exists():
        return []
    with _known() as known:
        found = {ranks: _judged(probed, known.hangs) for ranks, probed in known.probed.items()}
    return [
        f"{ranks} ranks on one device: {each.name} ({each.why})" for ranks, each in found.items()
    ]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Ask the probe for 2 and 3 ranks, or the file of an earlier run, and say what it found."""
    for ranks in (2, 3):
        found = backend_between(ranks)
        _say(f"{ranks} ranks on one device: {found.name} ({found.why})")
    _say(_file().read_text() if _file().exists() else "the probe was not asked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
