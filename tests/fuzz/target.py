"""What a target is, and how one case of it is run: in a folder of its own, with every write outside
of it refused."""

from __future__ import annotations

import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parts = list[Any]
"""What a case is made of. Any of them may be left out, which is how a failing case is made
smaller."""


@dataclass(frozen=True)
class Target:
    """Something to fuzz.

    Attributes:
        name: for the command line and the report.
        make: invents the parts of a case.
        run: tries them in an empty folder, which is also the working directory. Every exception is
            a failure.
        prepare: called once before the first case; may write elsewhere.
        trains: a case starts processes and takes minutes, not milliseconds; only this process is
            kept from writing.
    """

    name: str
    make: Callable[[random.Random], Parts]
    run: Callable[[Parts, Path], None]
    prepare: Callable[[], None] = lambda: None
    trains: bool = False

    @property
    def patience(self) -> float:
        """How many times longer than usual a case may take."""
        return 15.0 if self.trains else 1.0


@dataclass(frozen=True)
class Case:
    """One case, by what it is made from. `keep` are the positions of the parts that are used; None:
    all."""

    target: str
    seed: int
    number: int
    keep: tuple[int, ...] | None = None

    def parts(self, target: Target) -> Parts:
        made = target.make(random.Random(f"{self.target} {self.seed} {self.number}"))
        return made if self.keep is None else [made[position] for position in self.keep]


@dataclass(frozen=True)
class Failure:
    """What went wrong: the kind of error, and the traceback."""

    kind: str
    text: str


def require(is_so: object, text: str = "an error without a message") -> None:
    """Fail unless `is_so`; for what is required of an error, inside of ``except``."""
    if not is_so:
        raise AssertionError(text)


class OutsideError(BaseException):
    """Something was about to be written outside of the case's folder, or a process started. Nothing
    catches it."""


def run_case(target: Target, parts: Sequence[Any], folder: Path) -> Failure | None:
    """Run one case in `folder`, which is emptied before and removed afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        with only_writing_below(folder, starts_processes=target.trains):
            target.run(list(parts), folder)
    except BaseException as error:
        return Failure(type(error).__name__, traceback.format_exc()[-6000:])
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    return None


_allowed: list[str] = []
_watching = _may_start = False
_ONE_PATH = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"}
_TWO_PATHS = {"os.rename", "os.link", "os.symlink"}
_THROUGH_LINKS = {"open", "os.truncate", "os.chmod", "os.chown", "os.utime"}
_PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@contextmanager
def only_writing_below(folder: Path, starts_processes: bool = False) -> Iterator[None]:
    """Refuse, before it happens, to write elsewhere or to start a process."""
    global _watching, _may_start
    if not _watching:
        sys.addaudithook(_refuse)  # cannot be removed: this process is for fuzzing
        _watching = True
    _allowed.append(os.path.realpath(folder))
    _may_start = starts_processes
    try:
        yield
    finally:
        _allowed.pop()


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event in _PROCESSES and not _may_start:
        raise OutsideError(f"{event}{arguments[:1]}")
    for path in _written(event, arguments):
        through_links = event in _THROUGH_LINKS
        if isinstance(path, str | bytes) and not f"{_real(path, through_links)}/".startswith(
            f"{_allowed[-1]}/"
        ):
            raise OutsideError(f"{event} of {path!r}")


def _real(path: str | bytes, through_links: bool) -> str:
    """What is written: a link itself, or what it names."""
    try:
        folder, name = os.path.split(os.fsdecode(path))
        return (
            os.path.realpath(os.fsdecode(path))
            if through_links
            else os.path.join(os.path.realpath(folder), name)
        )
    except ValueError:  # a null byte: the call is about to fail
        return _allowed[-1]


def _written(event: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The paths that an audited event writes to."""
    if event == "open":
        path, _, flags = arguments
        return (path,) if isinstance(flags, int) and flags & _WRITING and path != os.devnull else ()
    if event in _ONE_PATH:
        return arguments[:1]
    if event == "os.symlink":
        return arguments[1:2]
    return arguments[:2] if event in _TWO_PATHS else ()
