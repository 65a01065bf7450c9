"""A part of a suite of benchmarks, and how it is run: a process of its own, with a limit, of which
nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.perf import report
from tests.perf.card import SKIPPED
from tools.stale_locks import remove_stale_locks

SHOWN_LINES, SHOWN_OF_BAD_LINES = 40, 200
LOOK_SECONDS = 0.2
"""How often it is looked what a part does."""
LIFE_SECONDS = 5.0
"""Of a silent part: it is said how often that it goes on."""
STATES = {0: "done", SKIPPED: "left out"}
"""By exit status; all others: failed."""
OUT = "{out}"


@dataclass(frozen=True)
class Part:
    """A process of a suite.

    Attributes:
        module: what is run with ``python -m``.
        arguments, toy: its command line at real sizes and at toy sizes, without ``--device``; `OUT`
            in it becomes the folder of the results.
        limit: seconds after which it is ended.
        result, toy_result: names of the files that it writes; rows of several parts may be in one.
        usual: seconds that it takes where nothing is slow, to say how much is left; 0: not known.
        covers: what it shows, for the list.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    toy: tuple[str, ...]
    limit: float
    result: str = ""
    toy_result: str = ""
    usual: float = 0.0
    covers: str = ""

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether one of `names` is this part's or the beginning of it."""
        return any(self.name == name or self.name.startswith(f"{name}/") for name in names)

    def result_of(self, toy: bool) -> str:
        """Name of the file that it writes; "" if it writes none."""
        return self.toy_result if toy else self.result


def operators(name: str) -> Part:
    """The part that compiles what later ones load; it takes no time if that is done."""
    covers = "compiles DeepSpeed's Adam, once"
    return Part(name, "tools.build_operators", (), (), 500, usual=55, covers=covers)


@dataclass
class Outcome:
    """What became of a part at a commit: `state` is "done", "failed", "overran" or "left out"; of
    that, `output` says why."""

    part: str
    state: str
    seconds: float = 0.0
    output: str = ""
    commit: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it was begun and did not end well."""
        return self.state in ("failed", "overran")


class Running:
    """A part at work, in a process group of its own; its output goes to a file until it has ended.

    Args:
        limit: seconds after which it is ended; may change.
    """

    def __init__(self, part: Part, device: str, toy: bool, limit: float) -> None:
        folder = report.path_of(part.name).parent
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [
            argument.replace(OUT, str(folder)) for argument in (part.toy if toy else part.arguments)
        ]
        environment = os.environ | {"DS_SKIP_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        if device == "accelerator":
            environment.pop("DS_ACCELERATOR", None)
            if part.module.startswith("tests.perf."):
                arguments += ["--device", device]
        self.part, self.limit = part, limit
        self._begin = time.monotonic()
        self._output = tempfile.TemporaryFile(prefix="dsext-part-")  # noqa: SIM115 - closed in `outcome`
        self._process = subprocess.Popen(
            [sys.executable, "-m", part.module, *arguments],
            cwd=report.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._told = self._begin

    def outcome(self) -> Outcome | None:
        """What became of it, of which nothing is left then; None while it runs."""
        code, seconds = self._process.poll(), time.monotonic() - self._begin
        if code is None and seconds < self.limit:
            if self._begin + seconds - self._told >= LIFE_SECONDS:
                self._told = self._begin + seconds
                print(f"{self.part.name} ... {seconds:.0f} s", flush=True)
            return None
        self.end()
        state = "overran" if code is None else STATES.get(code, "failed")
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        self._output.close()
        if state == "left out":
            return Outcome(self.part.name, state, seconds, lines[-1] if lines else "")
        shown = SHOWN_LINES if state == "done" else SHOWN_OF_BAD_LINES
        return Outcome(self.part.name, state, seconds, "\n".join(lines[-shown:]))

    def end(self) -> None:
        """End it and all that it has started: its ranks and their workers end with their parents,
        and this makes sure of it. A build that was killed leaves a lock, for which every later part
        would wait."""
        _end_group(self._process.pid)
        self._process.wait()
        if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
            remove_stale_locks(Path(folder))


def _end_group(leader: int) -> None:
    """End a process, its group, and what it has started in other groups, as ninja does with
    compilers."""
    others = list[psutil.Process]()
    with suppress(psutil.NoSuchProcess):
        others = psutil.Process(leader).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in others:
        with suppress(psutil.NoSuchProcess):
            process.kill()
