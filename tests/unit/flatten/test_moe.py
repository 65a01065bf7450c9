"""Expert parameters have process groups of their own; their flat buffers equal upstream's to the
bit too."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from tests.support.compare import base_config, compare_with_upstream
from tests.support.models import batches
from tests.support.ranks import run_ranks


class ExpertModel(torch.nn.Module):
    """An embedding, one layer of two experts, a head."""

    def __init__(self, ep_size: int, width: int = 20) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, width)
        self.experts = MoE(width, torch.nn.Linear(width, width), num_experts=2, ep_size=ep_size)
        self.head = torch.nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.experts(self.embed(tokens))
        loss = torch.nn.functional.cross_entropy(
            self.head(hidden).float().flatten(0, 1), tokens.flatten()
        )
        return loss + 0.01 * balance.float()


def groups(model: torch.nn.Module) -> list[dict]:
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )


def body(ep_size: int, tier: str | None) -> list[tuple[str, int]]:
    upstream = base_config(2, torch.bfloat16)
    extension = copy.deepcopy(upstream)
    extension["zero_optimization"]["flatten_tier"] = tier
    record = compare_with_upstream(
        upstream,
        extension,
        partial(ExpertModel, ep_size),
        batches(5, dist.get_rank()),
        groups=groups,
        probe=lambda engine: [
            (plan.tier, plan.facts.ranks) for plan in engine.optimizer.flatten_plans
        ],
        checkpoint=False,
    )
    return record.probe


@pytest.mark.parametrize(
    ("ep_size", "tier"), [(1, "distributed"), (1, "host"), (2, "host"), (2, None)]
)
def test_equals_upstream(ep_size: int, tier: str | None) -> None:
    for plans in run_ranks(2, body, ep_size, tier):
        assert {ranks for _, ranks in plans} == ({2} if ep_size == 1 else {1, 2})
        assert {chosen for chosen, _ in plans} == {tier or "accelerator"}
