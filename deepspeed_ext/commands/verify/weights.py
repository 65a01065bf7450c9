"""Compares the weights at the end of a check with their masters, their initial values and those of
the other ranks.

Under the predictive rule W is not p, but the result of `zenflow.optimizers.adam_estimator`. The
largest distance between them, per element, follows from its formulas. With S the interval, K =
CLAMP, and U lr the largest step of Adam:

- the S gradients in flight: each moves W by at most K lr for each of 2 S updates, but decays, so
  together 2 S K lr. As much again for the addends of L2: 4 S K lr;
- the momentum, over at most 2 S updates, and p, which is behind by at most S more: 3 S U lr;
- weight decay of as many updates: 3 S lr wd |p|;
- roundings of y, D and W to the dtype of the weights: four units in the last place.

U = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), by the inequality of Cauchy and Schwarz; twice that,
because bias corrections of the first steps are not one. The bound is coarse: it finds weights that
do not belong to these masters at all, not a single lost step. Weights that are no longer written
are found because they stand still while their masters move.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.commands.verify.config import Plan
from deepspeed_ext.commands.verify.figures import EndWeights
from deepspeed_ext.config.file import section_of
from deepspeed_ext.zenflow.kernels.definition import CLAMP

__all__ = ["compare_weights"]

LEAST_NUMEL = 32
"""Smaller parameters may return to their initial values by chance."""
ROUNDINGS = 4

Weights = dict[str, Tensor]
"""fp32, on the host, by the parameter's name."""


def compare_weights(
    plan: Plan,
    weights: Weights,
    masters: Weights,
    earlier: Sequence[tuple[Weights, Weights]],
    lr: float,
) -> EndWeights:
    """Find errors in this rank's weights; all ranks call this together.

    Args:
        weights: all weights of this rank's module.
        masters: all masters, or the weights if there are none.
        earlier: weights and masters from earlier steps, each at least one update ago.
        lr: the largest learning rate of the run.
    """
    rounded = _rounded(plan, masters)
    earlier = [(old, _rounded(plan, old_masters)) for old, old_masters in earlier]
    return EndWeights(
        astray={
            name: count
            for name in weights
            if (count := _astray(plan, weights[name], masters[name], lr))
        },
        still=[
            name
            for name in weights
            if any(
                _stands_still(weights[name], rounded[name], old[name], master[name])
                for old, master in earlier
            )
        ],
        divided=_divided(weights),
    )


def _rounded(plan: Plan, masters: Weights) -> Weights:
    dtype = getattr(torch, plan.dtype)
    return {name: master.to(dtype).float() for name, master in masters.items()}


def _astray(plan: Plan, weights: Tensor, masters: Tensor, lr: float) -> int:
    """Number of elements that do not follow from the masters by the rule."""
    dtype = getattr(torch, plan.dtype)
    if not plan.has_rounded_masters:
        return 0
    if plan.rule == "exact":
        rounded = masters.to(dtype).float()
        return int(((weights != rounded) & ~(weights.isnan() & rounded.isnan())).sum())
    params = section_of(section_of(plan.config, "optimizer"), "params")
    betas, decay = params.get("betas", (0.9, 0.999)), float(params.get("weight_decay", 0.0))
    bound, ahead = prediction_bound(lr, plan.longest_interval, betas)
    allowed = bound + masters.abs() * (ahead * lr * decay + ROUNDINGS * torch.finfo(dtype).eps)
    return int((~((weights - masters).abs() <= allowed)).sum())


def prediction_bound(lr: float, interval: int, betas: tuple[float, float]) -> tuple[float, int]:
    """The largest distance of a predicted weight from p without decay and rounding, and the updates
    it anticipates."""
    beta1, beta2 = (float(beta) for beta in betas)
    if beta1**2 >= beta2:
        return math.inf, 3 * interval
    step = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    return interval * lr * (4 * CLAMP + 3 * 2 * step), 3 * interval


def _stands_still(
    weights: Tensor, rounded: Tensor, old_weights: Tensor, old_rounded: Tensor
) -> bool:
    """Whether no weight has changed although most rounded masters have, which is wrong under every
    rule."""
    moved = int((rounded != old_rounded).sum())
    return (
        weights.numel() >= LEAST_NUMEL
        and 2 * moved > weights.numel()
        and torch.equal(weights, old_weights)
    )


def _divided(weights: Weights) -> list[str]:
    """Names of the weights that are not bitwise equal on all ranks."""
    mine = {
        name: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()
        for name, weight in weights.items()
    }
    ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    return [name for name in mine if any(rank.get(name) != mine[name] for rank in ranks)]
