"""Defines the check's small model and its data. Its parameters have many shapes, and all of them
move within a dozen steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_ext.commands.verify.batches import Batches

__all__ = ["SmallModel", "data_of", "new_model"]

VOCABULARY, TAGS, WIDTH, HIDDEN, LENGTH = 2053, 61, 64, 131, 24
COMMON = 89
"""Number of tokens that follow one another by a rule; one token in ten is a random other one."""
SEED = 20


class Mix(nn.Module):
    """Adds the two previous tokens, with a weight per channel: a parameter of three dimensions, or
    of two if `flat`."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        taps = 0.3 * torch.randn(3, 1, WIDTH, dtype=torch.float32, device="cpu")
        self.taps = nn.Parameter(taps.squeeze(1) if flat else taps)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, WIDTH]."""
        before = [functional.pad(x, (0, 0, shift, 0))[:, : x.shape[1]] for shift in range(3)]
        return x + sum(self.taps[shift] * earlier for shift, earlier in enumerate(before))


class Block(nn.Module):
    """A feed-forward block whose hidden size is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gain(nn.Module):
    """One number: the smallest possible parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class SmallModel(nn.Module):
    """Predicts the next token. The head is tied to the embedding; most rows of `tags` get no
    gradient in a step.

    Args:
        flat: whether no parameter has more than two dimensions.
    """

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.tags = nn.Embedding(TAGS, WIDTH)
        self.mix = Mix(flat)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = Gain()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.tags.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """tokens, tags: [batch, length], int64. Returns the mean cross-entropy, fp32."""
        x = self.mix(self.embedding(tokens) + self.tags(tags))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.gain(self.norm(x)))
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )


def new_model(flat: bool) -> SmallModel:
    """The model in fp32, on the host; the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return SmallModel(flat)


def data_of(step: int, rank: int, batches: Batches) -> list[tuple[Tensor, Tensor]]:
    """Tokens and tags of each micro-step of optimizer step `step` on `rank`, on the host."""
    draw = torch.Generator().manual_seed(1 + step * 4096 + rank)
    whole: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    found = []
    for _ in range(batches.accumulation):
        shape = (batches.micro, LENGTH)
        tokens = torch.randint(0, COMMON, (batches.micro, 1), generator=draw, **whole).repeat(
            1, LENGTH
        )
        for place in range(1, LENGTH):
            tokens[:, place] = (5 * tokens[:, place - 1] + 3) % COMMON
        rare = torch.randint(COMMON, VOCABULARY, shape, generator=draw, **whole)
        chance = torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu")
        tokens = torch.where(chance < 0.1, rare, tokens)
        tags = torch.randint(1, TAGS, shape, generator=draw, **whole)
        found.append(
            (
                tokens,
                torch.where(
                    torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu") < 0.05,
                    tags,
                    0,
                ),
            )
        )
    return found
