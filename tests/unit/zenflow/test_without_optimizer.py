"""An engine without an optimizer, such as a trainer's reference model, takes no notice of a
``zenflow`` section."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import deepspeed_ext
from tests.support.models import OddModel, batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled()


def reference_beside_training(stage: int, rule: str) -> tuple[list[float], list[float]]:
    """A trained model, and a reference model with its config as TRL makes it: no optimizer, and
    stage 0 unless 3."""
    config = zenflow_config(2 if stage == 0 else stage, **RULES[rule])
    trained = make_engine(config)
    config = copy.deepcopy(config)
    config["zero_optimization"]["stage"] = stage
    del config["optimizer"]
    torch.manual_seed(1234)
    reference, *_ = deepspeed_ext.initialize(model=OddModel(), config=config)
    assert not hasattr(reference.optimizer, "host_optimizer")
    data = batches(6, rank=0)
    before = losses(reference, data)
    assert train(trained, data[:1])[0] == before[0], "both begin with the same weights"
    train(trained, data)
    after = losses(reference, data)
    assert trained.optimizer.host_optimizer.state.updates == 7
    trained.destroy()
    reference.destroy()
    return before, after


@torch.no_grad()
def losses(engine: Any, data: list[torch.Tensor]) -> list[float]:
    engine.eval()
    return [engine(on_device(batch)).item() for batch in data]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_reference_model_stays_as_it_is(stage: int, rule: str) -> None:
    for before, after in run_ranks(2, reference_beside_training, stage, rule):
        assert after == before
