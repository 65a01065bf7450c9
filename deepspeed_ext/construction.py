"""Keeps the ranks in agreement while `deepspeed.initialize` builds an engine.

An engine is built inside `built_together`. DeepSpeed's own constructors run there too, so a rank that fails anywhere
meets the others at their next agreement. Only if DeepSpeed's next collective comes before that, the others wait in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup, raise_together
from deepspeed_ext._upstream import DeepSpeedConfig, dist, get_accelerator, local_rank

__all__ = ["JointConfig", "builders", "built_together"]


def builders(mpu: Any) -> RankGroup:
    """Return the ranks that build an engine together: all ranks, or only this one with the user's `mpu`.

    An `mpu` may give each engine its own ranks, so all ranks need not take part.
    """
    if mpu is not None or not dist.is_initialized():
        return RankGroup.alone()
    return RankGroup.of(None, torch.device(get_accelerator().current_device_name()))


@contextmanager
def built_together(mpu: Any) -> Iterator[None]:
    """Raise an error of the block on every rank, as `together`. An error that all ranks have keeps its type."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(builders(mpu), error, otherwise=None)  # looked up here: the block sets the current device


class JointConfig(DeepSpeedConfig):
    """DeepSpeed's config, as `deepspeed.initialize` reads it. An error of one rank is raised on every rank.

    A rank that reads it without an error goes on to build its engine, whose first agreement answers the others.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        try:
            super().__init__(config, mpu, mesh_device)
        except Exception as error:
            if dist.is_initialized():
                get_accelerator().set_device(local_rank())  # as the engine would; the agreement needs it
            raise_together(builders(mpu), error, otherwise=None)
