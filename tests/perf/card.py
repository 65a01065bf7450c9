"""A card with less memory than the device: another process holds the rest.

    python -m tests.perf.card --gib 24

torch's own fraction would not do: it leaves what the driver says of the device's memory as it is,
and ours plans with that. So a child process allocates whatever is free above `gib` and holds it
until its input ends; in the process that is measured, the driver's free memory is then the card's.
Its total is not, so `show` lets what is asked for it say so. The context of the process that is
measured is inside the card, as on a real one; that of the child is outside.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator

GIB = 1 << 30
HELD = "held"
START_SECONDS = 90.0
CLOSE_BYTES = 64 << 20
"""By so much the free memory may differ from the card's: allocators and drivers round."""

__all__ = ["SKIPPED", "CardError", "held", "hold", "show"]

SKIPPED = 77
"""Exit status of a part that this machine cannot run, as automake has it."""


class CardError(RuntimeError):
    """The device cannot stand for the card that was asked for."""


def hold(nbytes: int) -> list[torch.Tensor]:
    """Allocate what is free on the current device above `nbytes`, and return it.

    Raises:
        CardError: the device has less, or others have taken some of it.
    """
    info = memory_info()
    if info is None:
        return []  # the CPU, where the suite is only tried
    free, total = info()
    if total < nbytes:
        raise CardError(
            f"a card of {nbytes / GIB:.3g} GiB was asked for, and the device has "
            f"{total / GIB:.3g} GiB: name a smaller card, or a larger device"
        )
    device = get_accelerator().current_device_name()
    ballast = [torch.empty(max(0, free - nbytes), dtype=torch.uint8, device=device)]
    left, _ = info()
    if abs(left - nbytes) > CLOSE_BYTES:
        raise CardError(
            f"{left / GIB:.3g} GiB are free beside the ballast, not the {nbytes / GIB:.3g} GiB of "
            "the card: another process holds memory of the device"
        )
    return ballast


def show(nbytes: int) -> None:
    """Let this process be told that the device has no more than `nbytes`, from now on."""
    info = memory_info()
    if info is None:
        return
    accelerator = get_accelerator()
    module = torch.get_device_module(accelerator.device_name())

    def at_most(found: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            told = found(*args, **kwargs)
            if isinstance(told, tuple):
                return tuple(min(each, nbytes) for each in told)
            return min(told, nbytes)

        return answer

    patch.object(module, "mem_get_info", at_most(info)).start()
    patch.object(accelerator, "total_memory", at_most(accelerator.total_memory)).start()


def memory_info() -> Callable[..., tuple[int, int]] | None:
    """What asks the driver for free and total bytes; None on the CPU."""
    name = get_accelerator().device_name()
    if name == "cpu":
        return None
    return getattr(torch.get_device_module(name), "mem_get_info")  # noqa: B009 - not of every module


@contextmanager
def held(gib: float, device: str) -> Iterator[None]:
    """Inside, a child process holds all memory of the device but `gib` GiB.

    Raises:
        CardError: the device has less, or the child says nothing in its time.
    """
    environment = dict(os.environ)
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    else:
        environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-m", "tests.perf.card", "--gib", str(gib)]
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        _await_word(child)
        yield
    finally:
        child.kill()
        child.wait()


def _await_word(child: subprocess.Popen[bytes]) -> None:
    """Return once the child holds the memory."""
    assert child.stdout is not None
    said, deadline = b"", time.monotonic() + START_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if select.select([child.stdout], [], [], left)[0]:
            chunk = os.read(child.stdout.fileno(), 4096)
            said += chunk
            if any(line == HELD.encode() for line in said.splitlines()):
                return
            if not chunk:
                break
    lines = said.decode(errors="replace").strip().splitlines()
    raise CardError(
        lines[-1] if lines else f"the ballast was not there within {START_SECONDS:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, required=True, help="memory of the card")
    try:
        ballast = hold(int(parser.parse_args().gib * GIB))
    except CardError as error:
        print(error, flush=True)
        sys.exit(SKIPPED)
    print(HELD, flush=True)
    sys.stdin.buffer.read()  # until whoever has started this lets go, or has died
    del ballast


if __name__ == "__main__":
    main()
