"""Whole runs with ZenFlow on a rank, for tests on the CPU and on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param

from tests.support.models import OddModel, batches, two_groups
from tests.support.same import first_difference
from tests.support.zenflow import (
    Outcome,
    make_engine,
    masters_of,
    offload_config,
    run,
    train,
    weights_of,
    zenflow_config,
)


def initial_weights(stage: int, dtype: torch.dtype) -> dict:
    engine = make_engine(zenflow_config(stage, dtype))
    found = weights_of(engine)
    engine.destroy()
    return found


def with_and_without(config: dict, steps: int) -> tuple[Outcome, Outcome]:
    rank = dist.get_rank()
    return run(offload_config(config), steps, rank=rank, extended=False), run(
        config, steps, rank=rank
    )


def difference(expected: Outcome, actual: Outcome) -> float:
    """Distance of the two final models over the distance that the expected one has moved from the
    start (all L2)."""
    start = {
        name: p.detach().to(torch.bfloat16).float() for name, p in start_model().named_parameters()
    }
    apart = (
        sum(float((expected.weights[n] - actual.weights[n]).square().sum()) for n in start) ** 0.5
    )
    moved = sum(float((expected.weights[n] - start[n]).square().sum()) for n in start) ** 0.5
    return apart / moved


def start_model() -> OddModel:
    torch.manual_seed(1234)
    return OddModel()


def exact_and_back(config: dict) -> dict[str, Any]:
    """Three steps, a look at the exact weights, two more steps; compared with a run without that
    look."""
    engine = make_engine(config)
    undisturbed = train(engine, [*batches(3, dist.get_rank()), *batches(2, dist.get_rank())])[3:]
    engine.destroy()
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    predicted = weights_of(engine)
    with engine.optimizer.exact_weights():
        exact = weights_of(engine)
        masters = {
            name: safe_get_full_fp32_param(p).bfloat16().float().cpu()
            for name, p in engine.module.named_parameters()
        }
    after = weights_of(engine)
    losses = train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return {
        "exact": first_difference(masters, exact, "exact weights"),
        "predicted": first_difference(exact, predicted, "predicted weights"),
        "after": first_difference(predicted, after, "weights after the block"),
        "losses": first_difference(undisturbed, losses, "losses after the block"),
    }


def selective_config(
    stage: int, dtype: torch.dtype = torch.float32, **zenflow: Any
) -> dict[str, Any]:
    defaults = {
        "topk_ratio": 0.1,
        "update_interval": 2,
        "select_interval": 4,
    }
    return zenflow_config(stage, dtype, **{**defaults, **zenflow})


def losses_of(config: dict, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of a run, and its figures and weights."""
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, batches(steps, dist.get_rank()))
    adam = engine.optimizer.host_optimizer
    found = {
        "figures": adam.measurements(),
        "weights": weights_of(engine),
    }
    engine.destroy()
    return losses, found


def parked(config: dict[str, Any]) -> str:
    """How a run whose states go to the host and back after every step differs from one in which
    they stay."""
    found = []
    for away in (False, True):
        engine = make_engine(config, groups=two_groups)
        losses = []
        for batch in batches(5, dist.get_rank()):
            losses += train(engine, [batch])
            if away:
                engine.offload_states()
                engine.reload_states()
        found.append((losses, weights_of(engine), masters_of(engine)))
        engine.destroy()
    return first_difference(found[0], found[1], "losses, weights, masters")
