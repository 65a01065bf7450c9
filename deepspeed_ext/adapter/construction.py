"""Wraps the construction of an engine: an error of one rank is raised on every rank.

An engine is built inside `built_together`, including DeepSpeed's own constructors: a rank that
fails anywhere reports it at the other ranks' next agreement. If a collective of DeepSpeed comes
before that agreement, the others wait in it.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import model_groups, pipeline_topology
from deepspeed_ext.errors import ConfigError, StateError
from deepspeed_ext.runtime.backend import (
    dist,
    get_accelerator,
    local_rank,
)
from deepspeed_ext.runtime.ranks import RankGroup, raise_together


def ranks_of_model(mpu: Any, *, keeps_scratch: bool = False) -> RankGroup:
    """Return the ranks that the model is spread over. They build, step, save and load together, so
    they agree on every choice that changes weights, and an error of one is raised on all.

    Without an `mpu` these are all ranks. With one, which may give each engine other ranks, they are
    its one group that contains the others; or all ranks, if they are the grid of several groups. No
    collective.

    Args:
        mpu: as given to ``deepspeed.initialize``, or a pipeline's; None also with AutoTP, whose
            groups span all ranks.
        keeps_scratch: see `RankGroup.of`.

    Raises:
        ConfigError: several groups of `mpu` are not a grid of all ranks.
    """
    if not dist.is_initialized():
        return RankGroup.alone()
    axes: list[tuple[set[int], Any]] = []
    for group in {} if mpu is None else model_groups(mpu).values():
        members = set(torch.distributed.get_process_group_ranks(group))
        if not any(members <= others for others, _ in axes):
            axes = [axis for axis in axes if not axis[0] <= members] + [(members, group)]
    ranks = RankGroup.of(axes[0][1] if len(axes) == 1 else None, keeps_scratch=keeps_scratch)
    if len(axes) > 1 and math.prod(len(members) for members, _ in axes) != ranks.size:
        raise ConfigError(
            f"rank {ranks.rank}: the mpu has groups of ranks {[sorted(axis) for axis, _ in axes]}, "
            f"expected the axes of a grid of all {ranks.size} ranks, which share one rank, or one "
            "group that contains the others: give every engine an mpu over all ranks"
        )
    return ranks


@contextmanager
def built_together(mpu: Any) -> Iterator[None]:
    """Raise an error of the block on every rank, as `together` does. If all ranks have errors of
    one type, each raises its own."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
        if dist.is_initialized():
            with suppress(Exception):  # this rank may have no device of its own
                # the agreement needs it, and the block may have failed before setting it
                get_accelerator().set_device(local_rank())
    raise_together(ranks_of_model(mpu), error, otherwise=None)


def joint(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `deepspeed.initialize` in an agreement: an error of one rank, such as an unreadable
    config, is raised on every rank. The other ranks learn of it at their first agreement."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def joint_initialize(*args: Any, **kwargs: Any) -> Any:
        _require_own_group()
        given = signature.bind_partial(*args, **kwargs).arguments
        topology = given.get("mpu") or pipeline_topology(given.get("model"))
        with built_together(topology):
            return initialize(*args, **kwargs)

    return joint_initialize


_group_at_fork: weakref.ref[Any] | None = None
"""In a forked process: the process group that it has from its parent."""


def _note_group_at_fork() -> None:
    global _group_at_fork
    group = torch.distributed.group.WORLD
    _group_at_fork = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_note_group_at_fork)


def _require_own_group() -> None:
    """Check that the process group is not that of a parent, whose threads this process does not
    have: a collective would never end (Note: [Forked processes])."""
    if _group_at_fork is not None and _group_at_fork() is torch.distributed.group.WORLD is not None:
        raise StateError(
            f"deepspeed.initialize was called in process {os.getpid()}, which was forked from "
            f"process {os.getppid()} when that had a process group already, so its collectives "
            "would never end: fork before the parent trains, or start it with "
            'multiprocessing.get_context("spawn")'
        )
