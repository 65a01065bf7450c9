"""The start of a run compiles all kernels that its steps launch."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.kernels import launch
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

BLOCK = 32


def variants(config: dict[str, Any], steps: int) -> tuple[frozenset[Any], frozenset[Any]] | None:
    """The variants that the start has compiled, and those that the steps launch; None: no kernel
    runs on this accelerator."""
    if launch.missing(torch.device(get_accelerator().current_device_name())) is not None:
        return None
    with patch.object(launch, "_variants", set()):
        engine = make_engine(config, groups=two_groups)
        prepared = launch.variants()
    with patch.object(launch, "_variants", set()):
        train(engine, batches(steps, dist.get_rank()))
        launched = launch.variants()
        engine.destroy()
    return prepared, launched


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("options", [{"ratio": 1.0}, {"ratio": 0.5}, {"rule": "selective"}])
def test_steps_launch_only_what_the_start_has_compiled(
    stage: int, ranks: int, options: dict[str, Any]
) -> None:
    """Partitions of odd lengths at odd offsets."""
    rule = options.get("rule")
    config = zenflow_config(stage, block_size=BLOCK, **(RULES[rule] if rule else {}))
    if "ratio" in options:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **options}
    for found in run_ranks(ranks, variants, config, 6, device="accelerator"):
        if found is None:
            pytest.skip("Triton serves no accelerator here")
        prepared, launched = found
        assert launched
        assert launched <= prepared


def test_rows_are_aligned_if_each_begins_at_a_multiple_of_16_bytes() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert [launch.is_aligned(*of) for of in ((32, [x]), (12, [x]), (32, [x[1:]]))] == [1, 0, 0]
