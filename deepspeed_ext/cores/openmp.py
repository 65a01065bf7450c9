"""Sets the thread count of all OpenMP runtimes in this process.

A process may hold two runtimes: the one in torch's wheel, and the system's, which natively built
operators such as DeepSpeed's CPU Adam link against. Each reads OMP_NUM_THREADS once, when it is
loaded, so each must be set. The library threadpoolctl does not do the same; docs/results.md has the
measurement.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed_ext.runtime.procfs import read_text

__all__ = ["ThreadCount", "start_pool"]

_RUNTIME = re.compile(r"/(?:libgomp|libiomp5|libomp)[^/]*\.so[^/]*$")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# torch splits elementwise work into pieces of at least this many elements.
_GRAIN_ELEMENTS = 32768
# A process may have 65530 mappings, each with a path.
_MAPS_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class ThreadCount:
    """Thread counts to restore: torch's, each loaded runtime's, and the variables for later
    runtimes and processes."""

    torch_threads: int
    runtimes: dict[str, int]
    environment: dict[str, str | None]

    @classmethod
    def change(cls, threads: int) -> "ThreadCount":
        """Use ``threads`` threads from now on, and return the counts from before.

        torch applies the count in all threads; another OpenMP runtime applies it in the calling
        thread only.
        """
        before = cls(
            torch.get_num_threads(),
            {path: library.omp_get_max_threads() for path, library in _loaded()},
            {name: os.environ.get(name) for name in _VARIABLES},
        )
        torch.set_num_threads(threads)
        for _, library in _loaded():
            library.omp_set_num_threads(threads)
        for name in _VARIABLES:
            os.environ[name] = str(threads)
        return before

    def restore(self) -> None:
        """Restore the counts and the environment variables."""
        torch.set_num_threads(self.torch_threads)
        for path, library in _loaded():
            library.omp_set_num_threads(self.runtimes.get(path, self.torch_threads))
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_pool(threads: int) -> None:
    """Make torch start its pool of ``threads`` threads now."""
    torch.zeros(2 * threads * _GRAIN_ELEMENTS, dtype=torch.float32, device="cpu").add_(1)


def _loaded() -> Iterator[tuple[str, ctypes.CDLL]]:
    """Yield (path, library) of each OpenMP runtime mapped into this process; nothing if /proc
    cannot be read."""
    lines = (read_text(Path("/proc/self/maps"), _MAPS_LIMIT_BYTES) or "").splitlines()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}):
        try:
            yield path, ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
