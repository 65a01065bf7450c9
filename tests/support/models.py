"""Small models for tests, with the shapes that break flattening: odd sizes, a frozen and a
zero-size parameter."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn


class OddModel(nn.Module):
    """A two-layer network whose parameters have odd sizes, one of them frozen, one empty, one tied.

    Args:
        width: hidden size.
        awkward: also hold a frozen and a zero-size parameter.
    """

    def __init__(self, width: int = 37, awkward: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight
        if awkward:
            self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
            self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        if hasattr(self, "scale"):
            hidden = hidden * self.scale
        logits = self.head(hidden)
        return nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )


class Branches(nn.Module):
    """Two layers; the second is used, and gets a gradient, only if the first token is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.always, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.always(self.embed(tokens))
        if int(tokens[0, 0]):
            hidden = hidden + self.sometimes(hidden)
        return hidden.float().square().mean()


class SteepRegression(nn.Module):
    """A linear regression on 256 features whose scales lie four decades apart, in any order.

    At a high learning rate Adam is stable if each gradient is taken at weights that have all
    earlier updates. If not, the weights swing.
    """

    ROWS = 64
    features: torch.Tensor
    targets: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        scales = torch.logspace(-2, 2, 256)[torch.randperm(256, generator=generator)]
        features = torch.randn(self.ROWS, 256, generator=generator) * scales
        self.register_buffer("features", features)
        self.register_buffer("targets", features @ torch.randn(256, generator=generator))
        self.weight = nn.Parameter(torch.randn(256, generator=generator) * 0.1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.features[rows] @ self.weight - self.targets[rows]).square().mean()

    @classmethod
    def batches(cls, count: int, rank: int) -> list[torch.Tensor]:
        """`count` batches of numbers of rows, different on each rank."""
        generator = torch.Generator().manual_seed(rank)
        return [torch.randperm(cls.ROWS, generator=generator)[:16] for _ in range(count)]


class Linears(nn.Module):
    """Square matrices without bias, whole blocks: little work, large updates. Nothing in a step
    reads a value on the host."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).float().square().mean()


def two_groups(model: nn.Module) -> list[dict]:
    """Optimizer groups as trainers make them: weight decay for matrices, none for vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def this_device() -> torch.device:
    """This rank's accelerator."""
    return torch.device(get_accelerator().current_device_name())


def on_device(batch: torch.Tensor) -> torch.Tensor:
    """`batch` on this rank's accelerator."""
    return batch.to(this_device())


def batches(count: int, rank: int, seed: int = 0) -> list[torch.Tensor]:
    """`count` batches of tokens, 4 x 16 int64, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, 64, (4, 16), generator=generator) for _ in range(count)]
