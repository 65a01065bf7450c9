"""Runs cases in a child process and watches it: a case that hangs or crashes fails too, and what
fails is shrunk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tests.fuzz.target import Case, Failure

ROOT = Path(__file__).resolve().parents[2]
ALL = "tests.fuzz.targets:TARGETS"
CASE_SECONDS = 20.0
"""A case takes milliseconds; the rest is for a machine that is busy."""
START_SECONDS = 300.0
MOST_TRIES = 60
"""Of making a failing case smaller."""
HANG, CRASH = "hang", "crash"


@dataclass(frozen=True)
class Found:
    """A case that fails, made as small as could be, with its parts as text."""

    case: Case
    failure: Failure
    parts: list[str]

    def __str__(self) -> str:
        case = self.case
        repeat = (
            f"python -m tests.fuzz.run --target {case.target} "
            f"--seed {case.seed} --case {case.number}"
        )
        parts = "\n".join(f"    {part}" for part in self.parts)
        title = f"{self.failure.kind} in {case.target}, case {case.number}"
        return f"{title}\n{repeat}\nparts:\n{parts}\n\n{self.failure.text}"


class Fuzzer:
    """A context manager: its child ends with it.

    Args:
        where: ``module:name`` of the targets.
        case_seconds: a case that takes longer has hung; one that trains may take `Target.patience`
            times as long.

    Attributes:
        names: of the targets.
    """

    names: list[str]
    _patience: dict[str, float]

    def __init__(self, where: str = ALL, case_seconds: float = CASE_SECONDS) -> None:
        self._where = where
        self._seconds = case_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Fuzzer:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self._folder.cleanup()

    @property
    def slow(self) -> set[str]:
        """Names of targets that train."""
        return {name for name, patience in self._patience.items() if patience > 1.0}

    def find(self, case: Case) -> Found | None:
        """Run `case`; if it fails, what is left of it after shrinking."""
        failure = self.run(case)
        if failure is None:
            return None
        case, failure = self._shrink(case, failure)
        return Found(case, failure, self._describe(case))

    def run(self, case: Case) -> Failure | None:
        """Run `case` as it is."""
        answer = self._ask(case, runs=True)
        assert answer is None or isinstance(answer, Failure)
        return answer

    def _describe(self, case: Case) -> list[str]:
        answer = self._ask(case, runs=False)
        return answer if isinstance(answer, list) else [repr(answer)]

    def _shrink(self, case: Case, failure: Failure) -> tuple[Case, Failure]:
        """Leave out part after part, as long as what is left fails in the same way."""
        kept = tuple(range(len(self._describe(case))))
        tries = 5 if failure.kind == HANG or case.target in self.slow else MOST_TRIES
        for position in kept:
            if tries == 0:
                break
            tries -= 1
            smaller = replace(
                case, keep=tuple(other for other in case.keep or kept if other != position)
            )
            again = self.run(smaller)
            if again is not None and again.kind == failure.kind:
                case, failure = smaller, again
        return case, failure

    def _ask(self, case: Case, runs: bool) -> object:
        connection = self._connection or self._start()
        try:
            connection.send((case, runs))
            seconds = self._seconds * self._patience[case.target]
            if connection.poll(seconds):
                return connection.recv()
            failure = Failure(HANG, f"no end after {seconds:g} s")
        except (EOFError, OSError):
            assert self._child is not None
            failure = Failure(
                CRASH, f"the process ended with status {self._child.wait(self._seconds)}"
            )
        said = self._log.read_text(errors="replace")[-6000:]
        self._stop()
        return replace(failure, text=f"{failure.text}\n{said}")

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "stderr"

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        numbers = [str(theirs.fileno()), self._where, self._folder.name, str(self._seconds)]
        with theirs, self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.child", *numbers],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            if not self._connection.poll(START_SECONDS):
                raise TimeoutError
            self._patience = self._connection.recv()
            self.names = list(self._patience)
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"the fuzzing process did not start: {self._log.read_text(errors='replace')}"
            ) from error
        return self._connection

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._connection = None
