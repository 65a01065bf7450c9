"""Variants of Adam train exactly. That they equal ZeRO-Offload's is in test_composition.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.resuming import failed_resumes
from tests.support.same import first_difference
from tests.support.zenflow import (
    RULES,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)

UNCORRECTED = {"lr": 1e-3, "weight_decay": 0.1, "bias_correction": False}


def uncorrected(stage: int, rule: str) -> dict[str, Any]:
    config = zenflow_config(stage, **RULES[rule])
    config["optimizer"] = {"type": "Adam", "params": {**UNCORRECTED, "adam_w_mode": False}}
    return config


def minimized_and_maximized(config: dict[str, Any]) -> str:
    """How a run that minimizes the loss differs from one that maximizes its negative."""
    found = []
    for maximize in (False, True):
        config["optimizer"]["params"]["maximize"] = maximize
        engine = make_engine(config, groups=two_groups)
        losses = train(engine, batches(7, dist.get_rank()), times=-1.0 if maximize else 1.0)
        found.append(([abs(loss) for loss in losses], weights_of(engine), full_masters_of(engine)))
        engine.destroy()
    return first_difference(found[0], found[1], "losses, weights, masters")


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (2, "predictive"),
        (2, "selective"),
        pytest.param(3, "predictive", marks=pytest.mark.full),
        pytest.param(3, "selective", marks=pytest.mark.full),
    ],
)
def test_maximizing_the_negative_loss_is_minimizing_the_loss(stage: int, rule: str) -> None:
    config = zenflow_config(stage, torch.float32, **RULES[rule])
    assert run_ranks(1, minimized_and_maximized, config) == [""]


@pytest.mark.parametrize(
    ("stage", "rule"), [(3, "predictive"), pytest.param(2, "selective", marks=pytest.mark.full)]
)
def test_a_run_without_bias_correction_resumes_exactly(
    stage: int, rule: str, tmp_path: Path
) -> None:
    """Within an interval, and from its end."""
    assert failed_resumes(2, uncorrected(stage, rule), 4, 5, str(tmp_path)) == []
