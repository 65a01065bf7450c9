"""Stage 3 with experts in a leaf module, of which each rank uses some: steps, saves and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules

from deepspeed_ext.zenflow.step import link
from tests.support.drop_in_runs import RULES
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import RULES as OVERLAPPED
from tests.support.zenflow import (
    full_masters_of,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)
from tests.support.zero3 import Experts, ZooModel

pytestmark = pytest.mark.sampled(2)

STEPS = 6


def with_leaves() -> torch.nn.Module:
    model = ZooModel()
    set_z3_leaf_modules(model, [Experts])
    return model


def trained(config: dict[str, Any], extended: bool) -> dict[str, Any]:
    engine = make_engine(config, model=with_leaves, extended=extended)
    losses = train(engine, batches(STEPS * engine.gradient_accumulation_steps(), dist.get_rank()))
    found = {"losses": losses, "weights": weights_of(engine)}
    engine.destroy()
    return found


def with_and_without(config: dict[str, Any]) -> dict[str, Any]:
    """With the worker's definition in torch: the native pass rounds fused multiply-adds once."""
    found = {"offload": trained(offload_config(config), False)}
    for rule, fields in RULES.items():
        config["zero_optimization"]["zenflow"] = {
            "full_warm_up_rounds": 1,
            "overlap_step": False,
            **fields,
        }
        with patch.object(link, "library_path", lambda: None):
            found[rule] = trained(config, True)
    return found


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_overlap_it_equals_zero_offload(ranks: int) -> None:
    """In fp32, with accumulation: the predictive rule to the bit, the selective one to the rounding
    of hot blocks, which step in another order of operations. With ``offload_param``
    test_offload_param.py has such modules.

    Nothing is clipped, because ZeRO-Offload sums the squares of the norm in another order.
    """
    config = zenflow_config(3, torch.float32, accumulation=2) | {"gradient_clipping": 0.0}
    for found in run_ranks(ranks, with_and_without, config):
        expected = found["offload"]
        assert not first_difference(expected, found["predictive"])
        assert found["selective"]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert expected["losses"][-1] < 0.95 * expected["losses"][0]


def resumed(config: dict[str, Any], folder: str) -> list[str]:
    data = batches(STEPS, dist.get_rank())
    engine = make_engine(config, model=with_leaves)
    losses, found = [], []
    for step, batch in enumerate(data):
        engine.save_checkpoint(folder, tag=str(step))
        losses += train(engine, [batch])
    expected = weights_of(engine), full_masters_of(engine)
    engine.destroy()
    for step in (1, STEPS - 1):
        engine = make_engine(config, model=with_leaves)
        engine.load_checkpoint(folder, tag=str(step))
        rest = train(engine, data[step:])
        end = weights_of(engine), full_masters_of(engine)
        found.append(first_difference((losses[step:], expected), (rest, end), f"from {step}"))
        engine.destroy()
    return [each for each in found if each]


@pytest.mark.parametrize("rule", OVERLAPPED)
def test_a_resumed_run_is_exact(rule: str, tmp_path: Path) -> None:
    config = zenflow_config(3, torch.bfloat16, **OVERLAPPED[rule])
    assert run_ranks(2, resumed, config, str(tmp_path)) == [[], []]
