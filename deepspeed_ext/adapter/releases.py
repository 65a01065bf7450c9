"""What differs between the supported releases of DeepSpeed, in one place.

`contract.Since` marks the members that a release added. What of ours overrides such a member is not
called by an older release. What of ours calls or reads one asks a function of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.contract import release
from deepspeed_ext.runtime.backend import dist, get_accelerator

__all__ = [
    "group_paddings",
    "is_at_boundary",
    "makes_experts",
    "manages_accumulation",
    "norm_dtype",
    "norm_shows_overflow",
    "partition_rank",
    "partition_world_size",
]


def is_at_boundary(optimizer: Any) -> bool:
    """Whether the micro-step of a ZeRO `optimizer` ends an accumulation. Before 0.19.5 that is an
    attribute."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def makes_experts(config: Any) -> bool:
    """Whether a config replaces layers by parallel experts. Before 0.19.2 none does."""
    experts = getattr(config, "expert_parallel_config", None)
    return experts is not None and experts.enabled


def manages_accumulation(engine: Any) -> bool:
    """Whether the engine counts micro-steps. Before 0.19.4 it always does."""
    manages = getattr(engine, "managed_gradient_accumulation", None)
    return True if manages is None else bool(manages())


def partition_rank(optimizer: Any, param: Any) -> int:
    """This rank's number among those that hold a stage 3 parameter. Before 0.19.3 they are all
    data-parallel ranks."""
    if hasattr(optimizer, "_get_param_partition_rank"):
        return optimizer._get_param_partition_rank(param)
    return dist.get_rank(group=optimizer.dp_process_group)


def partition_world_size(param: Any) -> int:
    """The number of ranks that hold a stage 3 parameter."""
    if hasattr(param, "ds_zero_partition_world_size"):
        return param.ds_zero_partition_world_size
    return dist.get_world_size(group=param.ds_process_group)


def group_paddings(optimizer: Any) -> list[Sequence[int]]:
    """Elements of padding behind each parameter of each group, at stages 1 and 2. Before 0.19.7
    there are none."""
    if hasattr(optimizer, "round_robin_bit16_padding"):
        return optimizer.round_robin_bit16_padding
    return [[0] * len(group) for group in optimizer.round_robin_bit16_groups]


def norm_dtype() -> torch.dtype:
    """The dtype in which DeepSpeed computes gradient norms: fp64, since 0.19.6 only where the
    accelerator has it."""
    has_fp64 = getattr(get_accelerator(), "is_fp64_supported", None)
    return torch.float64 if has_fp64 is None or has_fp64() else torch.float32


def norm_shows_overflow() -> bool:
    """Whether a step that has found an invalid gradient norm is an overflow. Before 0.19.8 only
    ``check_overflow``, which comes before the norm, finds one; stage 3 calls it with fp16 alone."""
    return release() >= (0, 19, 8)
