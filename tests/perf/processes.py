"""One way to train, in processes of its own, which a benchmark asks in turns; and a guard of the
host's memory."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed_ext.runtime.proc import available_host_bytes
from tests.support.ranks import RankPool

START_SECONDS, CALL_SECONDS, END_SECONDS = 300.0, 1200.0, 120.0
"""A process that ends gives back its page-locked memory first, which takes a while."""
GIB = 1 << 30
LEAST_FREE_BYTES = 3 * GIB
LOOK_SECONDS = 0.1


class Processes:
    """The ranks of one way to train.

    Args:
        name: the way, for errors.
        device: "cpu" or "accelerator".
        start_seconds: within which they must have started.

    Attributes:
        least_free: the fewest bytes of the host that were free in a call.
    """

    def __init__(
        self, name: str, ranks: int, device: str, start_seconds: float = START_SECONDS
    ) -> None:
        self.name = name
        self.ended_because = ""
        self.free_before = self.least_free = available_host_bytes()
        self._pool = RankPool(ranks, device, start_timeout_seconds=start_seconds)

    def call(
        self, body: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS
    ) -> list[Any]:
        """What `body` returns on each rank.

        Raises:
            RuntimeError: it failed on one of them, or took longer than `seconds`.
        """
        outcomes = self._pool.run(body, args, {}, seconds)
        for outcome in outcomes:
            if outcome.error or outcome.exit_code is not None:
                said = outcome.error or f"ended with {outcome.exit_code}"
                raise RuntimeError(f"{self.name}: {self.ended_because or said}")
        return [outcome.value for outcome in outcomes]

    def end(self, why: str) -> None:
        """End the ranks at once; a call that waits for them raises with `why`."""
        self.ended_because = why
        for process in self._pool.processes:
            process.kill()

    def close(self) -> None:
        """End the processes, and wait until they have given back what they held."""
        for process in self._pool.processes:
            process.kill()
        for process in self._pool.processes:
            with suppress(TimeoutError, subprocess.TimeoutExpired):
                process.wait(timeout=END_SECONDS)
        self._pool.close()


def be_the_first_to_end() -> None:
    """Body of a rank: if memory is short, the kernel ends this process and not the benchmark."""
    Path("/proc/self/oom_score_adj").write_text("1000")


@contextmanager
def guarded(
    processes: Processes,
    least: int = LEAST_FREE_BYTES,
    free: Callable[[], int] = available_host_bytes,
) -> Iterator[None]:
    """End `processes` if fewer than `least` bytes of the host are left inside the block: they would
    take the machine with them, and what was measured so far."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            left = free()
            processes.least_free = min(processes.least_free, left)
            if left < least:
                processes.end(f"out of host memory: {left / GIB:.1f} GiB were left")
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
