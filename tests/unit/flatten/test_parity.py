"""Flat buffers, losses and checkpoints equal upstream's to the bit, whatever tier built the buffers."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.compare import base_config, compare_with_upstream
from tests.support.matrix import cover
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks

TIERS = ("accelerator", "distributed", "host")
WAYS = ("plain", "offload", "round_robin", "alignment", "groups")
STEPS = 20

MATRIX = [
    case
    for case in itertools.product(TIERS, (1, 2), (1, 2, 3), ("bf16", "fp32"), WAYS)
    if not (case[0] == "distributed" and case[2] == 1)
]


def body(tier: str, stage: int, dtype: str, way: str) -> tuple[list[str], list[float]]:
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


def check(tier: str, stage: int, world_size: int, dtype: str, way: str) -> None:
    for tiers, losses in run_ranks(world_size, body, tier, stage, dtype, way):
        assert tiers == [tier] * (2 if way == "groups" else 1)
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("tier", "stage", "world_size", "dtype", "way"), cover(MATRIX))
def test_equals_upstream(tier: str, stage: int, world_size: int, dtype: str, way: str) -> None:
    check(tier, stage, world_size, dtype, way)


@pytest.mark.full
@pytest.mark.parametrize(("tier", "stage", "world_size", "dtype", "way"), MATRIX)
def test_equals_upstream_everywhere(tier: str, stage: int, world_size: int, dtype: str, way: str) -> None:
    check(tier, stage, world_size, dtype, way)
