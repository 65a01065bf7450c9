"""Reports during a long wait that it continues, and what is being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from deepspeed_ext.runtime.builds import operator_folder

__all__ = ["Progress", "being_compiled"]

COMPILERS = {"c++", "g++", "cc1plus", "clang", "clang++", "nvcc", "cicc", "ptxas", "hipcc", "ninja"}
LOOK_SECONDS, LIFE_SECONDS = 0.5, 5.0


def being_compiled(processes: Iterable[int]) -> list[str]:
    """The targets of compilers that these processes have started: DeepSpeed's operators by name,
    other sources by file.

    Args:
        processes: process ids; processes that have ended are ignored.
    """
    found: dict[str, None] = {}
    for pid in processes:
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    if child.name() in COMPILERS:
                        found |= dict.fromkeys(_subject(child))
    return list(found)


def _subject(compiler: psutil.Process) -> list[str]:
    folder = Path(compiler.cwd())
    if folder.resolve().is_relative_to(operator_folder().resolve()):
        return [f"DeepSpeed's operator {folder.name}"]
    words = compiler.cmdline()
    if any("torchinductor" in word for word in words):
        return ["kernels of torch.compile"]
    return [Path(word).name for word in words if word.endswith((".cpp", ".cc", ".cu"))][:1]


class Progress:
    """Reports that a silent wait continues; call `look` repeatedly during the wait.

    Args:
        what: what is waited for, or a function that describes its progress.
        processes: ids of the processes that work on it.
        tell: called with each line.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        processes: Callable[[], Iterable[int]],
        tell: Callable[[str], object],
    ) -> None:
        self._what, self._processes, self._tell = what, processes, tell
        self._begin = self._told = self._looked = time.monotonic()
        self._compiled: set[str] = set()

    def look(self) -> None:
        """Report each compilation that has begun and, every `LIFE_SECONDS`, that the wait
        continues."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        compiled = being_compiled(self._processes())
        new = [name for name in compiled if name not in self._compiled]
        if not new and now - self._told < LIFE_SECONDS:
            return
        self._told = now
        self._compiled |= set(compiled)
        what = self._what if isinstance(self._what, str) else self._what()
        doing = (
            f"compiling {', '.join(compiled)}{' (minutes, once)' if new else ''}"
            if compiled
            else what
        )
        self._tell(f"{doing} ... {now - self._begin:.0f} s")
