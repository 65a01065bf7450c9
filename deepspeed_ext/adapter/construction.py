"""Raises an error of one rank on every rank while `deepspeed.initialize` builds an engine.

An engine is built inside `built_together`. DeepSpeed's own constructors run there too: a rank that fails anywhere
reports it at the other ranks' next agreement. If a collective of DeepSpeed comes before that agreement, the others wait
in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from deepspeed_ext.adapter.upstream import pipeline_topology
from deepspeed_ext.runtime.backend import dist, get_accelerator, local_rank
from deepspeed_ext.runtime.garbage import earlier_objects_left_out
from deepspeed_ext.runtime.ranks import RankGroup, raise_together

__all__ = ["builders", "built_together", "joint"]


def builders(mpu: Any) -> RankGroup:
    """Return the ranks that build an engine together: all ranks, or only this one with the user's `mpu`.

    An `mpu` may give each engine its own ranks, so some ranks may not take part.
    """
    if mpu is not None or not dist.is_initialized():
        return RankGroup.alone()
    return RankGroup.of(None)


@contextmanager
def built_together(mpu: Any) -> Iterator[None]:
    """Raise an error of the block on every rank, as `together` does. An error that all ranks have keeps its type."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
        if dist.is_initialized():
            with suppress(Exception):  # a rank without a device of its own
                get_accelerator().set_device(local_rank())  # for the agreement; the block may have failed before
    raise_together(builders(mpu), error, otherwise=None)


def joint(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `deepspeed.initialize` with an agreement around it: an error of one rank, such as a config that it cannot
    read, is raised on every rank. The other ranks learn of it at the first agreement while they build their engines."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def joint_initialize(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        topology = given.get("mpu") or pipeline_topology(given.get("model"))
        with built_together(topology), earlier_objects_left_out():
            return initialize(*args, **kwargs)

    return joint_initialize
