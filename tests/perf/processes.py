"""One way to train, in processes of its own, which a benchmark asks in turns; and a guard of the
host's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed_ext.runtime.proc import available_host_bytes
from tests.support.ranks import RankPool

TIMEOUT_SECONDS = 1200.0
GIB = 1 << 30
LEAST_FREE_BYTES = 3 * GIB
LOOK_SECONDS = 0.1


class Processes:
    """The ranks of one way to train.

    Args:
        name: the way, for errors.
        device: "cpu" or "accelerator".
    """

    def __init__(self, name: str, ranks: int, device: str) -> None:
        self.name = name
        self.ended_because = ""
        self._pool = RankPool(ranks, device)

    def call(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """What `body` returns on each rank.

        Raises:
            RuntimeError: it failed on one of them.
        """
        outcomes = self._pool.run(body, args, {}, TIMEOUT_SECONDS)
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
        """End the processes."""
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
            if (left := free()) < least:
                processes.end(f"out of host memory: {left / GIB:.1f} GiB were left")
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
