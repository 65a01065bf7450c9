"""Reading and writing masters and moments as DeepSpeed's users do, while a run goes on."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import utils


def moments_of(engine: Any) -> tuple[str, ...]:
    """Names of the moments. DeepSpeed's CPU Lion has a second one, but never uses it."""
    is_lion = "Lion" in type(engine.optimizer.optimizer).__name__
    return ("exp_avg",) if is_lion else ("exp_avg", "exp_avg_sq")


def state_of(engine: Any) -> dict[tuple, torch.Tensor]:
    """Master and moments of every parameter, as DeepSpeed hands them to a user."""
    found = {}
    trained = (each for each in engine.module.named_parameters() if each[1].requires_grad)
    for name, parameter in trained:
        for key in (None, *moments_of(engine)):
            value = (
                utils.safe_get_full_optimizer_state(parameter, key)
                if key
                else utils.safe_get_full_fp32_param(parameter)
            )
            found[name, key] = value.detach().float().cpu().clone()
    return found


def scale_state(engine: Any, factor: float) -> None:
    """Multiply what `state_of` returns. At stage 3 rank by rank: DeepSpeed's functions that set
    whole parameters cannot set those that do not divide by the ranks."""
    kind = "local" if engine.zero_optimization_stage() == 3 else "full"
    get, put, get_state, put_state = (
        getattr(utils, f"safe_{verb}_{kind}_{what}")
        for what in ("fp32_param", "optimizer_state")
        for verb in ("get", "set")
    )
    for parameter in filter(lambda each: each.requires_grad, engine.module.parameters()):
        put(parameter, get(parameter) * factor)
        for key in moments_of(engine):
            put_state(parameter, get_state(parameter, key) * factor, key)
