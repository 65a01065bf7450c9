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

import torch

from deepspeed_ext.adapter.upstream import model_groups, pipeline_topology
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.backend import dist, get_accelerator, local_rank
from deepspeed_ext.runtime.garbage import earlier_objects_left_out
from deepspeed_ext.runtime.ranks import GridRanks, RankGroup, raise_together

__all__ = ["built_together", "joint", "ranks_of_model"]


def ranks_of_model(mpu: Any, *, keeps_scratch: bool = False) -> RankGroup:
    """Return the ranks that the model is spread over. They build, step, save and load together, so
    they agree on every choice that changes weights, and an error of one is raised on all.

    Without an `mpu` these are all ranks. An `mpu` may give each engine its own ranks, so some may not
    take part: then they are the grid of its data-, tensor-, pipeline- and sequence-parallel groups.
    DeepSpeed reduces norm and overflow over the same grid, at the same points of a step. No collective.

    Args:
        mpu: as given to ``deepspeed.initialize``, or a pipeline's; AutoTP's groups are of all ranks.
        keeps_scratch: see `RankGroup.of`.

    Raises:
        ConfigError: the groups of `mpu` are not a grid.
    """
    if not dist.is_initialized():
        return RankGroup.alone()
    if mpu is None:
        return RankGroup.of(None, keeps_scratch=keeps_scratch)
    axes: list[tuple[set[int], Any]] = []
    for name, group in model_groups(mpu).items():
        members = set(torch.distributed.get_process_group_ranks(group))
        if any(members <= others for others, _ in axes):
            continue
        axes = [(others, each) for others, each in axes if not others <= members]
        if any(len(members & others) > 1 for others, _ in axes):
            raise ConfigError(
                f"rank {dist.get_rank()}: mpu.{name}() has ranks {sorted(members)}, of which several "
                f"are in another group of the mpu, {[sorted(others) for others, _ in axes]}: two "
                "groups of different axes share one rank, or one holds the other"
            )
        axes.append((members, group))
    return GridRanks.along([RankGroup.of(group, keeps_scratch=keeps_scratch) for _, group in axes])


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
    raise_together(ranks_of_model(mpu), error, otherwise=None)


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
