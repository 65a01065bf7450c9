"""A small mixture of experts, whose experts belong to fewer ranks than the rest."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

__all__ = ["ExpertModel", "expert_groups", "replicas_differ"]


class ExpertModel(nn.Module):
    """An embedding, one layer of experts, a head.

    Args:
        ep_size: ranks over which the experts are distributed.
        experts: their number.
        width: hidden size; the sizes of all parameters are odd or even with it.
    """

    def __init__(self, ep_size: int, experts: int = 2, width: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        expert = nn.Sequential(
            nn.Linear(width, 2 * width + 1), nn.ReLU(), nn.Linear(2 * width + 1, width)
        )
        # every token reaches its expert, so that no draw
        # and no rounding decides which tokens are dropped
        self.experts = MoE(
            width,
            expert,
            num_experts=experts,
            ep_size=ep_size,
            use_rts=False,
            drop_tokens=False,
            k=1,
        )
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.experts(self.embed(tokens))
        logits = self.head(hidden).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * balance.float()


def expert_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Optimizer groups as DeepSpeed's documentation makes them."""
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )


def replicas_differ(engine: Any) -> list[str]:
    """Names of parameters whose replicas are not equal to the bit. A collective."""
    found = []
    for name, param in engine.module.named_parameters():
        group = (
            engine.expert_data_parallel_group[param.group_name]
            if not getattr(param, "allreduce", True)
            else None
        )
        rows = [torch.empty_like(param.data) for _ in range(dist.get_world_size(group=group))]
        dist.all_gather(rows, param.data.contiguous(), group=group)
        if any(not torch.equal(rows[0], row) for row in rows[1:]):
            found.append(name)
    return found
