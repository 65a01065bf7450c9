"""A part of a suite of benchmarks, and how it is run: a process of its own, with a limit, of which nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from deepspeed_ext.runtime.progress import Progress
from tests.perf import report

SHOWN_LINES = 40
LOOK_SECONDS = 0.5
"""How often it is looked what a silent part does."""
OUT = "{out}"


@dataclass(frozen=True)
class Part:
    """A process of a suite.

    Attributes:
        module: what is run with ``python -m``.
        arguments, toy: its command line at real sizes and at toy sizes, without ``--device``; `OUT` in it becomes the
            folder of the results.
        limit: seconds after which it is ended.
        result, toy_result: names of the files that it writes; rows of several parts may be in one.
        usual: seconds that it takes where nothing is slow, to say how much is left; 0: not known.
        covers: what it shows, for the list.
        ranks: on a machine with fewer devices, it runs only if its name is asked for.
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
    ranks: int = 1

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether one of `names` is this part's or the beginning of it."""
        return any(self.name == name or self.name.startswith(f"{name}/") for name in names)

    def result_of(self, toy: bool) -> str:
        """Name of the file that it writes; "" if it writes none."""
        return self.toy_result if toy else self.result


def operators(name: str) -> Part:
    """The part that compiles what later ones load; it takes no time if that is done."""
    return Part(name, "tools.build_operators", (), (), 300, usual=90, covers="compiles DeepSpeed's Adam, once")


@dataclass
class Outcome:
    """What became of a part at a commit: `state` is "done", "failed", "overran" or "left out"; of that, `output` says
    why."""

    part: str
    state: str
    seconds: float = 0.0
    output: str = ""
    commit: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it was begun and did not end well."""
        return self.state in ("failed", "overran")


def run(part: Part, device: str, toy: bool, limit: float) -> Outcome:
    """Run `part` for at most `limit` seconds; nothing that it has started is left afterwards."""
    folder = report.path_of(part.name).parent
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [argument.replace(OUT, str(folder)) for argument in (part.toy if toy else part.arguments)]
    environment = os.environ | {"DS_SKIP_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    if device == "accelerator":
        environment.pop("DS_ACCELERATOR", None)
        if part.module.startswith("tests.perf."):
            arguments += ["--device", device]
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", part.module, *arguments],
        cwd=report.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    progress = Progress(part.name, lambda: [process.pid], partial(print, flush=True))
    output, state = "", "overran"
    try:
        while time.monotonic() - begin < limit:
            with suppress(subprocess.TimeoutExpired):
                output, state = process.communicate(timeout=min(LOOK_SECONDS, limit))[0], ""
                break
            progress.look()
    finally:
        _end_group(process.pid)  # its ranks and their workers end with their parents, and this makes sure of it
    if state:
        output = process.communicate()[0]
    state = state or ("done" if process.returncode == 0 else "failed")
    return Outcome(part.name, state, time.monotonic() - begin, "\n".join(output.splitlines()[-SHOWN_LINES:]))


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
