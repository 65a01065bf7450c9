"""Configs that trainers ship with CPU offload train with a `zenflow` section added that only names
the rule."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed import comm as dist

from tests.support.drop_in_runs import apart
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.trainer_configs import SHIPPED, shipped
from tests.support.zenflow import make_engine, train, weights_of

pytestmark = pytest.mark.sampled(3)

STEPS = 6


def trained(config: dict[str, Any], extended: bool) -> dict[str, Any]:
    engine = make_engine(config, extended=extended)
    start, losses = weights_of(engine), train(engine, batches(STEPS, dist.get_rank()))
    found = {"start": start, "losses": losses, "weights": weights_of(engine)}
    engine.destroy()
    return found


def with_zenflow(name: str) -> Any:
    """A run with the section added, and one with ZeRO-Offload."""
    config = shipped(name, dist.get_world_size())
    if "offload_optimizer" not in config["zero_optimization"]:
        # as with the Trainer's own AdamW; DeepSpeed's fused one has no simulated accelerator
        config["optimizer"]["params"]["torch_adam"] = True
    added = {
        **config,
        "zero_optimization": {
            **config["zero_optimization"],
            "zenflow": {"update_rule": "predictive"},
        },
    }
    return trained(added, True), trained(config, False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_section_that_names_the_rule_is_enough(name: str, device: str) -> None:
    """All steps are among the synchronous ones that are the default, so they are ZeRO-Offload's."""
    for found in run_ranks(2, with_zenflow, name, device=device):
        actual, expected = found
        loss, distance = apart(expected, actual, expected["start"])
        assert loss < 5e-3
        assert distance < 0.05
