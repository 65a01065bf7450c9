"""A model whose outputs are linear in its weights: gradients do not depend on them, so plain
autograd and torch's AdamW in fp32 are an exact reference for the masters, whatever the rule
predicts."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Bomb", "LinearNet", "Plain", "drawn_loss", "leaf"]


class Bomb(torch.autograd.Function):
    """Passes a tensor through; its backward raises `Bomb.error` once, where `Bomb.at` says."""

    at: int | None = None
    error: type[BaseException] = ValueError

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: int) -> torch.Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if Bomb.at == ctx.place:
            Bomb.at = None
            raise Bomb.error("bomb")
        return grad, None


class Layer(torch.nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.sizes = place, (40 + place, 7)
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 40 + place))
        self.bias = torch.nn.Parameter(torch.linspace(-0.5, 1, 7))

    def forward(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(10 * seed + self.place)
        first, second = (torch.randn(size, generator=draw).to(x.device) for size in self.sizes)
        x = Bomb.apply(x, self.place)
        return x + (self.weight * first).sum() + (self.bias * second).sum()


class LinearNet(torch.nn.Module):
    """Four layers; an input of shape [1] passes through all of them, and `seed` draws the
    gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(place) for place in range(4)])

    def forward(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, seed)
        return x


class Plain:
    """The calls of an engine around plain autograd. A parameter without gradient counts as one
    whose gradient is zero, as in DeepSpeed."""

    def __init__(self, lr: float, weight_decay: float, accumulation: int = 1) -> None:
        torch.manual_seed(1234)
        self.module, self.accumulation, self._micro_steps = LinearNet(), accumulation, 0
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=lr, weight_decay=weight_decay
        )
        self._zero()

    def _zero(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        y = self.module(x, seed)
        if y.requires_grad:
            y.register_hook(lambda grad: grad / self.accumulation)
        return y

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self.accumulation == 0:
            self.optimizer.step()
            self._zero()


def leaf(engine: Any) -> torch.Tensor:
    """An input that requires a gradient."""
    device = getattr(engine, "device", "cpu")
    return torch.zeros(1, requires_grad=True, device=device)


def drawn_loss(engine: Any, seed: int) -> torch.Tensor:
    """A loss whose gradients `seed` draws."""
    return engine(leaf(engine), seed).sum()
