"""Targets that fail in every way, for the tests of the fuzzer."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from tests.fuzz.target import Parts, Target


def digits(rng: random.Random) -> Parts:
    return [rng.randrange(10) for _ in range(12)]


def fail_on_seven(parts: Parts, folder: Path) -> None:
    if 7 in parts:
        raise ZeroDivisionError("seven")


def end_on_seven(parts: Parts, folder: Path) -> None:
    if 7 in parts:
        os._exit(3)


def hang_on_seven(parts: Parts, folder: Path) -> None:
    if 7 in parts:
        time.sleep(600)


def write_outside_on_seven(parts: Parts, folder: Path) -> None:
    (folder / "inside").write_text("fine")
    if 7 not in parts:
        return
    try:
        (folder.parent / "outside").write_text("not fine")
    except Exception as error:
        raise ValueError("nothing may catch that") from error


TARGETS = tuple(
    Target(run.__name__, digits, run)
    for run in (fail_on_seven, end_on_seven, hang_on_seven, write_outside_on_seven)
)
