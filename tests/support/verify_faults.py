"""Ranks of ``deepspeed-ext verify`` in which something is wrong on purpose: each shows that a check can fail."""

from __future__ import annotations

import time
from typing import Any

import torch

from deepspeed_ext.verify import rank

DROPPED = "blocks.0.up.bias"
"""The parameter whose gradient `DropsAGradient` drops."""


class ScramblesWeights(rank.Rank):
    """`initialize` turns one matrix around."""

    def make_engine(self, model: Any) -> Any:
        engine = super().make_engine(model)
        with torch.no_grad():
            weight = engine.module.blocks[0].up.weight
            weight.copy_(weight.flip(0))
        return engine


class DropsAGradient(rank.Rank):
    """One parameter's gradient is lost, in one step."""

    def make_engine(self, model: Any) -> Any:
        calls: list[None] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return torch.zeros_like(gradient) if len(calls) == 3 else gradient

        dict(model.named_parameters())[DROPPED].register_hook(hook)
        return super().make_engine(model)


class DoublesGradients(rank.Rank):
    """Every gradient counts twice, which Adam hardly notices."""

    def make_engine(self, model: Any) -> Any:
        for param in model.parameters():
            param.register_hook(lambda gradient: 2 * gradient)
        return super().make_engine(model)


class ForgetsMoments(rank.Rank):
    """Resuming loads the weights only."""

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / rank.CHECKPOINT), tag="saved", load_optimizer_states=False)


class HangsWithoutWorker(rank.Rank):
    """A rank whose optimizer process has died waits for ever."""

    def step(self, number: int) -> float:
        while self.found.movements:  # they have been compared, so what comes is the death
            time.sleep(0.1)
        return super().step(number)


class TrainsWithoutWorker(rank.Rank):
    """Nobody notices that an optimizer process has died."""

    def step(self, number: int) -> float:
        return 0.0 if self.found.movements else super().step(number)


class Several(DropsAGradient, ForgetsMoments, TrainsWithoutWorker):
    """Three faults at once."""


def start(fault: type[rank.Rank]) -> str:
    """Python code that runs a rank with this fault."""
    return f"from tests.support.verify_faults import main; main({fault.__name__!r})"


def main(name: str) -> None:
    rank.main(globals()[name])
