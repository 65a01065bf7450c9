"""Flat buffers, losses and checkpoints equal upstream's to the bit, whatever tier built the
buffers."""

from __future__ import annotations

import itertools

import pytest

from deepspeed_ext.adapter.upstream import release
from tests.support.flatten import STEPS, TIERS, compare_tier
from tests.support.matrix import some
from tests.support.ranks import run_ranks

SINCE_0_19_7 = ("alignment",) if release() >= (0, 19, 7) else ()
WAYS = ("plain", "offload", "round_robin", *SINCE_0_19_7, "groups")

MATRIX = [
    case
    for case in itertools.product(TIERS, (1, 2), (1, 2, 3), ("bf16", "fp32"), WAYS)
    if not (case[0] == "distributed" and case[2] == 1)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("tier", "stage", "world_size", "dtype", "way"), some(MATRIX))
def test_equals_upstream(tier: str, stage: int, world_size: int, dtype: str, way: str) -> None:
    for tiers, losses in run_ranks(world_size, compare_tier, tier, stage, dtype, way):
        assert tiers == [tier] * (2 if way == "groups" else 1)
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]
