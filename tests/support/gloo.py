"""Mends a defect of older DeepSpeed on CPU ranks, for tests that run with it."""

from __future__ import annotations

import functools
from typing import Any

from deepspeed import comm as dist

from deepspeed_ext.adapter.upstream import release

__all__ = ["await_every_gather"]


def await_every_gather() -> None:
    """Let an asynchronous all-gather end before it returns, with DeepSpeed before 0.19.8.

    Its ``GatheredParameters`` waits for the last of several gathers alone. Those of NCCL run in
    order; gloo's, which CPU ranks use, do not, and now and then a parameter is read before it is
    written: NaN.
    """
    if release() >= (0, 19, 8):
        return
    theirs = dist.all_gather_into_tensor

    @functools.wraps(theirs)
    def awaited(*args: Any, **kwargs: Any) -> Any:
        work = theirs(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    dist.all_gather_into_tensor = awaited
