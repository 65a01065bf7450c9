"""ZenFlow inside DeepSpeed with overlap: close to AdamW, and what schedulers and hooks see."""

import warnings
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import (
    RULES,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)
from tests.support.zenflow_runs import with_and_without

pytestmark = pytest.mark.sampled(6)

STAGES = [1, 2, 3]


CLOSE: dict[str, tuple[dict[str, Any], float]] = {
    "AdamW": ({}, 0.02),
    "bf16 moments": ({"state_dtype": "bfloat16"}, 0.02),
    "8-bit moments": ({"state_dtype": "int8"}, 0.02),
    "Lion": ({}, 0.05),
}
"""Fields of the section, and by how much losses at the end may differ."""


@pytest.mark.parametrize("where", ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize("stage", STAGES)
def test_overlapped_training_stays_close_to_zero_offload(
    stage: int, ranks: int, name: str, where: str
) -> None:
    """Forty steps of a steep descent; what the schemes reach on a real task is measured by
    bench_convergence.py."""
    fields, apart = CLOSE[name]
    lr = 1e-2 if name == "AdamW" else 1e-3
    config = zenflow_config(stage, full_warm_up_rounds=1, lr=lr, **fields)
    if name == "Lion":
        params = {"lr": lr, "betas": [0.9, 0.99], "weight_decay": 0.1}
        config["optimizer"] = {"type": "Lion", "params": params}
    for expected, actual in run_ranks(ranks, with_and_without, config, 40, device=where):
        assert sum(actual.losses[-10:]) == pytest.approx(sum(expected.losses[-10:]), rel=apart)
        assert actual.losses != expected.losses


def warnings_of_a_torch_scheduler(config: dict) -> tuple[list[str], int]:
    """What torch warns of while its own scheduler follows the optimizer, and how often a step hook
    was called."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine(config, lr_scheduler=scheduler)
        calls: list[int] = []
        engine.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        train(engine, batches(3, dist.get_rank()))
        engine.destroy()
    return [str(w.message) for w in caught if "lr_scheduler" in str(w.message)], len(calls)


@pytest.mark.parametrize("stage", [2, 3])
def test_schedulers_and_step_hooks_see_every_step(stage: int) -> None:
    assert run_ranks(1, warnings_of_a_torch_scheduler, zenflow_config(stage)) == [([], 3)]


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [2, 3])
def test_maximizing_the_negative_loss_is_minimizing_the_loss(stage: int, rule: str) -> None:
    config = zenflow_config(stage, torch.float32, **RULES[rule])
    assert run_ranks(1, minimized_and_maximized, config) == [""]
