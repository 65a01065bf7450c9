"""The model and the data of programs of `tests.fuzz.programs`."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import on_device

WIDTH, TOKENS = 12, 32


class Net(nn.Module):
    """Tied weights, a layer that is called twice, one that may be left out, and a frozen
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.maybe = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, skips: bool = False, how: str = "") -> torch.Tensor:
        hidden = self.norm(self.embed(tokens)) * self.scale
        if how and torch.is_grad_enabled():
            hidden = checkpoint(self._inner, hidden, skips, use_reentrant=how == "reentrant")
        else:
            hidden = self._inner(hidden, skips)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def _inner(self, hidden: torch.Tensor, skips: bool) -> torch.Tensor:
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        hidden = hidden + self.again(torch.tanh(self.again(hidden)))
        return hidden if skips else hidden + self.maybe(hidden)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def tokens_of(seed: int) -> torch.Tensor:
    """Another batch on each rank."""
    draw = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    return on_device(torch.randint(0, TOKENS, (2, 8), generator=draw))


def like(tensor: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """Drawn values of its shape, the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tensor.shape, generator=draw).to(tensor) * 0.2
