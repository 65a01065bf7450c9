"""Runs programs in forks of a process that has imported torch and DeepSpeed: for tests of what a
program does, not of how it starts."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping

from tests.support.ranks import nursery

__all__ = ["run_forked"]


def run_forked(
    module: str, *arguments: str, environment: Mapping[str, str], seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """``python -m module *arguments``, or ``python module *arguments`` of a file, in the
    repository's folder, with this environment.

    The process has one thread, no OpenMP pool, and torch imported before the package.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = nursery().start_script(module, arguments, dict(environment), out, err)
        try:
            status = process.wait(timeout=seconds)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        said = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess([module, *arguments], status, *said)
