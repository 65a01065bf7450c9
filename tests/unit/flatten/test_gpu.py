"""Tiered flattening on a real accelerator: equal to upstream to the bit; two ranks share a device if they must."""

from __future__ import annotations

import pytest

from tests.support.flatten import TIERS, compare_tier
from tests.support.ranks import run_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "offload"])
@pytest.mark.parametrize("tier", TIERS)
def test_equals_upstream_on_an_accelerator(tier: str, way: str) -> None:
    for tiers, losses in run_ranks(2, compare_tier, tier, 2, "bf16", way, device="accelerator"):
        assert set(tiers) == {tier}
        assert losses[-1] < losses[0]
