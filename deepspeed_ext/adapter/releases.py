"""All differences between the supported releases of DeepSpeed.

`contract.Since` marks the members that a release added. Older releases do not call our overrides of
such members; our code that calls or reads them does so by a function of this module.
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
    """Whether the current micro-step of a ZeRO `optimizer` ends an accumulation; an attribute
    before 0.19.5."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def makes_experts(config: Any) -> bool:
    """Whether a config replaces layers by parallel experts (AutoEP); never before 0.19.2."""
    experts = getattr(config, "expert_parallel_config", None)
    return experts is not None and experts.enabled


def manages_accumulation(engine: Any) -> bool:
    """Whether the engine counts micro-steps; always before 0.19.4."""
    manages = getattr(engine, "managed_gradient_accumulation", None)
    return True if manages is None else bool(manages())


def partition_rank(optimizer: Any, param: Any) -> int:
    """This rank's number among those that hold a stage 3 parameter, before 0.19.3 all data-parallel
    ranks."""
    if hasattr(optimizer, "_get_param_partition_rank"):
        return optimizer._get_param_partition_rank(param)
    return dist.get_rank(group=optimizer.dp_process_group)


def partition_world_size(param: Any) -> int:
    """The number of ranks that hold a stage 3 parameter."""
    if hasattr(param, "ds_zero_partition_world_size"):
        return param.ds_zero_partition_world_size
    return dist.get_world_size(group=param.ds_process_group)


def group_paddings(optimizer: Any) -> list[Sequence[int]]:
    """Elements of padding after each parameter of each group, at stages 1 and 2; 0 before
    0.19.7."""
    if hasattr(optimizer, "round_robin_bit16_padding"):
        return optimizer.round_robin_bit16_padding
    return [[0] * len(group) for group in optimizer.round_robin_bit16_groups]


def norm_dtype() -> torch.dtype:
    """The dtype in which DeepSpeed computes gradient norms: fp64, or since 0.19.6 fp32 on an
    accelerator without fp64."""
    has_fp64 = getattr(get_accelerator(), "is_fp64_supported", None)
    return torch.float64 if has_fp64 is None or has_fp64() else torch.float32


def norm_shows_overflow() -> bool:
    """Whether a non-finite gradient norm skips the step as an overflow. Before 0.19.8 only
    ``check_overflow`` does, which runs before the norm, at stage 3 only with fp16."""
    return release() >= (0, 19, 8)
