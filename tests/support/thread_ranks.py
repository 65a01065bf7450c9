"""Ranks that are threads of this process: quick, and what they exchange are plain objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext.runtime.ranks import RankGroup

__all__ = ["GatheringRanks", "run_together"]

TIMEOUT_SECONDS = 20


class Board:
    """Where ranks that are threads of this process gather from each other; a rank that never comes
    is an error."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number, timeout=TIMEOUT_SECONDS)
        self._items: list[Any] = [None] * number

    def gather(self, rank: int, item: Any) -> list[Any]:
        self._items[rank] = item
        self._barrier.wait()
        items = list(self._items)
        self._barrier.wait()
        return items


class GatheringRanks(RankGroup):
    """A rank whose group is a `Board`, or another object that gathers one value of each rank."""

    def global_rank(self, rank: int) -> int:
        return rank

    def minimum(self, *values: int) -> tuple[int, ...]:
        return tuple(map(min, zip(*self.group.gather(self.rank, values), strict=True)))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        everyones = self.group.gather(self.rank, tensor.tolist())
        return torch.tensor(everyones, dtype=tensor.dtype, device="cpu")

    def broadcast(self, value: Any, owner: int = 0) -> Any:
        return self.group.gather(self.rank, value)[owner]


def run_together(number: int, call: Callable[[RankGroup], Any]) -> list[Any]:
    """Answers or errors of `call` on ranks that are threads."""
    board = Board(number)
    answers: list[Any] = [None] * number

    def run(rank: int) -> None:
        try:
            answers[rank] = call(GatheringRanks(board, rank, number, torch.device("cpu")))
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
    return answers
