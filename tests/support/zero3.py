"""A model with everything that ZeRO-3 has to fetch in its own way, and the parameters of a ZeRO-3
engine as tensors."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

WIDTH = 24


class Experts(nn.Module):
    """Two linear layers of which one is used, by turns; as a leaf module both are fetched
    together."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 1) for _ in range(2))
        self.out = nn.Linear(WIDTH + 1, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(
            torch.relu(self.experts[0](hidden)) + 0.1 * torch.tanh(self.experts[1](hidden))
        )


class Gate(nn.Module):
    """Scales by a parameter that another module reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain


class Block(nn.Module):
    """Norm, experts and a residual; multiplies by a parameter that belongs to `gate` (an external
    parameter)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()

    def forward(self, hidden: torch.Tensor, gate: Gate) -> torch.Tensor:
        return hidden + self.experts(self.norm(hidden)) * gate.gain


class ZooModel(nn.Module):
    """Token model with tied, frozen and external parameters, odd sizes, and sizes from 1 element to
    a few thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.gate = Gate()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wide = nn.Linear(WIDTH, 67)
        self.narrow = nn.Linear(67, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.single = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        deepspeed.zero.register_external_parameter(self, self.scale)
        deepspeed.zero.register_external_parameter(self, self.single)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.gate(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden, self.gate)
        hidden = hidden + self.narrow(torch.relu(self.wide(hidden))) * self.scale * self.single
        logits = self.head(hidden)
        return nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )


def with_leaves() -> ZooModel:
    """The model, whose experts are fetched together."""
    model = ZooModel()
    set_z3_leaf_modules(model, [Experts])
    return model


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter of a ZeRO-3 engine, whole, by ``GatheredParameters``."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().cpu().clone()
    return found


def fetch(parameters: list[Any]) -> None:
    """Gather `parameters` as DeepSpeed's coordinator does before a module runs, and wait."""
    with torch.no_grad():
        parameters[0].all_gather_coalesced(parameters).wait()
