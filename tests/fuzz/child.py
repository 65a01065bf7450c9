"""The process that runs cases: ``python -m tests.fuzz.child FD MODULE:NAME FOLDER SECONDS``. The
runner watches it."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import reprlib
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.target import Case, Target, run_case

MEMORY_BYTES = 6 << 30
"""What a case may allocate, beside what importing has."""


def main() -> None:
    descriptor, where, folder, seconds = sys.argv[1:]
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", str(Path("~/.cache/torch_extensions/fuzz").expanduser())
    )
    os.environ.update(HOME=folder, XDG_CACHE_HOME=folder, MPLCONFIGDIR=folder, DS_ACCELERATOR="cpu")
    sys.dont_write_bytecode = True
    module, _, name = where.partition(":")
    targets: dict[str, Target] = {
        target.name: target for target in getattr(importlib.import_module(module), name)
    }
    logging.disable(logging.CRITICAL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    faulthandler.enable()
    connection = Connection(int(descriptor))
    for target in targets.values():
        target.prepare()
    connection.send({target.name: target.patience for target in targets.values()})
    while (request := connection.recv()) is not None:
        case, runs = request
        connection.send(_answer(targets[case.target], case, runs, Path(folder), float(seconds)))


shown = reprlib.Repr()
"""Parts for people: not all of what is long or nested deep, which the number of the case makes
again."""
shown.maxlevel, shown.maxstring, shown.maxother, shown.maxlong = 12, 400, 400, 500
shown.maxdict = shown.maxlist = shown.maxtuple = 40


def _answer(target: Target, case: Case, runs: bool, folder: Path, seconds: float) -> object:
    """The case's failure or None; if it is only to be described, its parts as text."""
    parts = case.parts(target)
    if not runs:
        return [shown.repr(part) for part in parts]
    faulthandler.dump_traceback_later(0.8 * seconds * target.patience)
    try:
        return run_case(target, parts, folder / "case")
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
