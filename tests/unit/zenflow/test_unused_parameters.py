"""Parameters that a step does not use have no gradient there, which is zero, as for stages 1 and 2
without offload.

DeepSpeed 0.19.8 applies the gradient of the last step that used them again: at stage 3, and with
ZeRO-Offload at every stage (`test_deepspeed_applies_the_last_gradient_again` shows when that has
changed).
"""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad
from torch import nn

from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, offload_config, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS, WIDTH, BRANCHES = 8, 8, 3


class Branches(nn.Module):
    """A micro-step uses some of the branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = self.stem(x)
        for number in used:
            hidden = hidden + self.branches[number](hidden)
        return hidden.square().mean()


def patterns(accumulation: int, seed: int) -> list[list[list[int]]]:
    """Branches of every micro-step of every step."""
    draw = random.Random(seed)
    return [
        [[number for number in range(BRANCHES) if draw.random() < 0.4] for _ in range(accumulation)]
        for _ in range(STEPS)
    ]


def data(accumulation: int, seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(4, WIDTH, generator=generator) for _ in range(accumulation)]
        for _ in range(STEPS)
    ]


def distance(config: dict[str, Any], seed: int) -> float:
    """From torch's AdamW with zeros in place of missing gradients: the largest of all masters."""
    accumulation = config["gradient_accumulation_steps"]
    engine, model = make_engine(config, model=Branches), Branches()
    adam = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    for pattern, inputs in zip(patterns(accumulation, seed), data(accumulation, seed), strict=True):
        for used, x in zip(pattern, inputs, strict=True):
            engine.backward(engine(on_device(x), used))
            engine.step()
            (model(x, used) / accumulation).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        adam.step()
        adam.zero_grad()
    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return max(
        float((master.cpu() - p).abs().max())
        for master, p in zip(masters, model.parameters(), strict=True)
    )


def with_accumulation(config: dict[str, Any], accumulation: int) -> dict[str, Any]:
    parameters = {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.1}
    optimizer = {"type": "AdamW", "params": parameters}
    return config | {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": optimizer,
    }


ON_HOST = {"offload_param": {"device": "cpu"}}
LEAVE = {"zenflow": {"gradients_on_host": True, "overlap_step": False}}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (2, {}), (3, {}), (3, ON_HOST)])
def test_what_is_not_used_has_no_gradient(stage: int, zero: dict, accumulation: int) -> None:
    config = zenflow_config(stage, torch.float32, overlap_step=False)
    config["zero_optimization"] |= zero
    assert max(run_ranks(2, distance, with_accumulation(config, accumulation), 0)) < 1e-5


def moved(
    engine: Any, step: Callable[[Any, Callable[[list[int]], None]], None], branch: int
) -> float:
    """How far a branch's weight moves by a step, its decay left out; `step` gets the engine and a
    backward."""
    weight = engine.module.branches[branch].weight
    x = on_device(torch.randn(4, WIDTH)).to(engine.module.stem.weight.dtype)
    before = safe_get_full_fp32_param(weight).clone()
    step(engine, lambda used: engine.backward(engine(x, used)))
    return float((safe_get_full_fp32_param(weight) - before * (1 - 1e-3)).abs().max())


def sets_one(engine: Any, backward: Callable[[list[int]], None]) -> None:
    backward([0])
    weights = [branch.weight for branch in engine.module.branches]
    for weight in weights:
        safe_set_full_grad(weight, torch.ones(WIDTH, WIDTH, device=weight.device))
    engine.step()
    assert float(engine.get_global_grad_norm()) >= 0.99 * WIDTH * math.sqrt(len(weights))


def discards_one(engine: Any, backward: Callable[[list[int]], None]) -> None:
    backward([1])
    engine.optimizer.zero_grad()
    backward([0])
    engine.step()


def overflows(engine: Any, backward: Callable[[list[int]], None]) -> None:
    backward([1])
    weight = engine.module.branches[1].weight
    safe_set_full_grad(weight, torch.full((WIDTH, WIDTH), math.inf, device=weight.device))
    engine.step()
    backward([0])
    engine.step()


def movements(config: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """Of branch 1, each by an engine of its own."""
    cases = [sets_one, discards_one] if dtype is torch.float32 else [overflows]
    found = []
    for case in cases:
        engine = make_engine(config, model=Branches)
        found.append(moved(engine, case, 1))
        engine.destroy()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stage", "zero"), [(2, {}), (2, LEAVE), (3, {}), (3, ON_HOST)])
def test_gradients_that_are_set_or_discarded(stage: int, zero: dict, dtype: torch.dtype) -> None:
    config = with_accumulation(zenflow_config(stage, dtype, overlap_step=False), 1)
    config["zero_optimization"] |= zero
    expected = [0.01, 0.0] if dtype is torch.float32 else [0.0]
    for found in run_ranks(2, movements, config, dtype, device="sim" if zero is LEAVE else "cpu"):
        assert found == pytest.approx(expected, abs=1e-3)


def test_deepspeed_applies_the_last_gradient_again() -> None:
    """Delete our part of this when it no longer does."""
    config = with_accumulation(offload_config(zenflow_config(3, torch.float32)), 1)
    assert min(run_ranks(2, distance, config, 0)) > 1e-3
