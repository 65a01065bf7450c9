"""The quick start of the documentation trains. `make test-package` runs it as a user does."""

from __future__ import annotations

import contextlib
import io

import deepspeed_ext
from tests.support import quick_start
from tests.support.ranks import run_ranks


def printed() -> str:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(quick_start.SCRIPT, "quick_start.py", "exec"), {"__name__": "__main__"})
    finally:
        deepspeed_ext.disable()
    return output.getvalue()


def test_it_trains_on_two_ranks() -> None:
    first, second = run_ranks(2, printed)
    losses = quick_start.losses(first)
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert not quick_start.losses(second)
