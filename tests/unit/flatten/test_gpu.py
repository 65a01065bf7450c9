"""Tiered flattening on a real accelerator: equal to upstream to the bit; two ranks share a device
if they must.

On the simulated one, also without the profile of start-up, which waits for the device after every
phase.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.flatten import staging, tiers
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.flatten import TIERS, compare_tier
from tests.support.ranks import run_ranks
from tests.support.same import first_difference


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "offload"])
@pytest.mark.parametrize("tier", TIERS)
def test_equals_upstream_on_an_accelerator(tier: str, way: str) -> None:
    for chosen, losses in run_ranks(2, compare_tier, tier, 2, "bf16", way, device="accelerator"):
        assert set(chosen) == {tier}
        assert losses[-1] < losses[0]


def staged(direction: str) -> str:
    """Ten chunks and a rest, through two chunks; the first difference."""
    device = get_accelerator().current_device_name()
    values = torch.arange(1000, dtype=torch.float32)
    nothing = torch.full_like(values, math.nan)
    with patch.object(staging, "STAGING_CHUNK_BYTES", 96 * values.itemsize):
        chunks = Staging(values.dtype)
    if direction == "down":
        chunks.to_host(values.to(device), target := nothing)
    else:
        chunks.to_device(values, target := nothing.to(device))
    return first_difference(values, target, direction)


@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_chunk_is_used_again_once_its_copy_has_arrived(direction: str) -> None:
    assert run_ranks(1, staged, direction, device="sim") == [""]


def freed_on_another_stream(tier: str) -> str:
    """Flatten parameters that were allocated on another stream, which then reuses their memory; the
    first difference."""
    accelerator = get_accelerator()
    device, side = torch.device(accelerator.current_device_name()), accelerator.Stream()
    values = [torch.full((1000,), 1.0 + index) for index in range(3)]
    with accelerator.stream(side):
        parameters = [torch.nn.Parameter(value.to(device)) for value in values]
    accelerator.synchronize()
    layout = GroupLayout.of(parameters, [0] * len(values), 2)
    ranks = RankGroup.of(dist.get_world_group(), device)
    # It waits for the device only if it has something to give back.
    with patch.object(type(accelerator), "empty_cache"):
        flat = tiers.from_slices(layout, ranks, 1 << 20, on_host=tier == "host")
    with accelerator.stream(side):
        others = [torch.full((1000,), math.nan, device=device) for _ in values]
    found = first_difference(torch.cat(values), flat, tier)
    accelerator.synchronize()
    del others
    return found


@pytest.mark.parametrize("tier", ["distributed", "host"])
def test_parameters_are_copied_before_any_stream_can_reuse_their_memory(tier: str) -> None:
    assert run_ranks(1, freed_on_another_stream, tier, device="sim") == [""]
