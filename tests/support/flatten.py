"""Training with flat buffers that a given tier has built, compared with DeepSpeed."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist

from tests.support.compare import base_config, compare_with_upstream
from tests.support.models import OddModel, batches, two_groups

TIERS = ("accelerator", "distributed", "host")
STEPS = 20


def compare_tier(tier: str, stage: int, dtype: str, way: str) -> tuple[list[str], list[float]]:
    """Train with DeepSpeed and with a tier, and compare to the bit; returns the tiers of the groups
    and the losses."""
    upstream = base_config(stage, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    zero: dict[str, Any] = upstream["zero_optimization"]
    if way == "offload":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif way == "round_robin":
        zero["round_robin_gradients"] = True
    elif way == "alignment":
        zero["parameter_alignment"] = True
    extension = copy.deepcopy(upstream)
    extension["zero_optimization"]["flatten_tier"] = tier
    record = compare_with_upstream(
        upstream,
        extension,
        partial(OddModel, awkward=way == "groups"),
        batches(STEPS, dist.get_rank()),
        groups=two_groups if way == "groups" else None,
        probe=lambda engine: [plan.tier for plan in engine.optimizer.flatten_plans],
    )
    return record.probe, record.losses
