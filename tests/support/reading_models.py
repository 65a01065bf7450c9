"""Draws models that reach their weights in every way that a forward can: through a module's own
forward, through its parent, through a list, a hook or a parametrization, or by no module's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 12


class ReadsChild(nn.Module):
    """Uses a child's weight whose forward it may not call."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.never_called = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(rows, self.never_called.weight, self.child.bias)
        return hidden + self.child(rows)


class HoldsList(nn.Module):
    """Refers to weights in a plain list, as ``nn.LSTM`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.shared = [self.inner.weight, self.inner.bias]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, *self.shared)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.lstm(rows.unsqueeze(0))[0].squeeze(0)


class Attention(nn.Module):
    """Its projection's forward is never called: torch reads the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.unsqueeze(0)
        return self.attention(rows, rows, rows, need_weights=False)[0].squeeze(0)


class Listed(nn.Module):
    """Weights of no module with a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(2))
        self.scales = nn.ParameterDict({"first": torch.ones(WIDTH), "unused": torch.ones(WIDTH)})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            rows = rows @ matrix
        return rows * self.scales["first"]


class Checkpointed(nn.Module):
    """Runs its forward again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsChild()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, rows, use_reentrant=False)


class Functional(nn.Module):
    """Calls its child with weights that it takes from another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.source = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = {"weight": self.source.weight, "bias": self.shape.bias}
        return torch.func.functional_call(self.shape, weights, (rows,))


class Hooked(nn.Module):
    """A hook of the user's, in front of all others, reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(self.scaled, prepend=True)

    def scaled(self, module: nn.Module, rows: tuple[torch.Tensor]) -> Any:
        return rows[0] * self.beside.bias * module.get_parameter("bias")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


class Compiled(nn.Module):
    """A compiled child, of which a parent also reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsChild()
        self.inner.compile(backend="eager")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) + self.inner.child.bias


class Scripted(nn.Module):
    """Without the optimizations of torch's executor, which change rounding after some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.jit.optimized_execution(False):
            return self.inner(rows)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def normed_by_a_hook() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a parent reads its child's": ReadsChild,
    "a list": HoldsList,
    "recurrent": Recurrent,
    "attention": Attention,
    "parameter list": Listed,
    "checkpointed": Checkpointed,
    "functional call": Functional,
    "a user's hook": Hooked,
    "parametrized": parametrized,
    "weight norm": normed_by_a_hook,
    "plain": plain,
}
OPAQUE: dict[str, Callable[[], nn.Module]] = {"compiled": Compiled, "scripted": Scripted}
"""Kinds that make a whole model wait at once."""


class Drawn(nn.Module):
    """Some of these, in an order that follows from the batch; some are left out of it, one is used
    twice, and the weight of the embedding is also that of the head.

    Args:
        seed: draws kinds and their number.
        also: further kinds.
    """

    def __init__(self, seed: int, also: tuple[str, ...] = ()) -> None:
        super().__init__()
        draw = random.Random(seed)
        kinds = [*also, *draw.sample(sorted(KINDS), 4)]
        draw.shuffle(kinds)
        self.kinds = kinds
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList((KINDS | OPAQUE)[kind]() for kind in kinds)
        self.tied = nn.Linear(WIDTH, 64, bias=False)
        self.tied.weight = self.embed.weight
        self.outside = nn.Linear(WIDTH, WIDTH)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Some of the forward, without a module's call around it."""
        hidden = functional.linear(self.embed(tokens), self.outside.weight)
        draw = random.Random(int(tokens.sum()) % 5)
        order = [draw.randrange(len(self.blocks)) for _ in self.blocks]
        for number in order:
            hidden = hidden + torch.tanh(self.blocks[number](hidden))
        return hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encode(tokens.flatten())
        if int(tokens.sum()) % 2:
            logits = functional.linear(hidden, self.embed.weight)
        else:
            logits = self.tied(hidden)
        return functional.cross_entropy(logits[:-1].float(), tokens.flatten()[1:])
