"""Agreement between ranks, before any collective depends on it.

Every rank derives its plans from facts that should be equal everywhere. `require_same_plan` proves it once a plan, so
that a difference is an error on every rank that prints the plans, and never a hang.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext._errors import PlanMismatchError
from deepspeed_ext._upstream import dist

__all__ = ["RankGroup", "require_same_plan"]


@dataclass(frozen=True)
class RankGroup:
    """A process group as this rank sees it, resolved once and then passed along.

    Attributes:
        group: the torch.distributed process group.
        rank: this rank's number inside the group.
        size: number of ranks in the group.
        device: device of the tensors that this group's backend can communicate.
    """

    group: Any
    rank: int
    size: int
    device: torch.device

    @classmethod
    def of(cls, group: Any, device: torch.device) -> RankGroup:
        return cls(group, dist.get_rank(group=group), dist.get_world_size(group=group), device)

    def global_rank(self, rank: int) -> int:
        """The number in the world of the group's `rank`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def minimum(self, *values: int) -> tuple[int, ...]:
        """Elementwise minimum of `values` over the ranks."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tuple(tensor.tolist())

    def all(self, flag: bool) -> bool:
        """Whether `flag` holds on every rank."""
        return bool(self.minimum(int(flag))[0])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, of one shape and dtype, in rank order."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, any object that pickles, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


def digest(plan: Any) -> str:
    """A short digest of a plan's ``repr``."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def require_same_plan(what: str, plan: Any, ranks: RankGroup) -> None:
    """Compare `plan` (by its ``repr``) over the ranks.

    Raises:
        PlanMismatchError: on every rank, with every differing plan and the ranks that hold it.
    """
    if ranks.size == 1:
        return
    if len(set(ranks.gather(digest(plan)))) == 1:
        return
    holders: dict[str, list[int]] = {}
    for rank, text in enumerate(ranks.gather(repr(plan))):
        holders.setdefault(text, []).append(ranks.global_rank(rank))
    listing = "; ".join(f"ranks {who}: {text}" for text, who in holders.items())
    raise PlanMismatchError(
        f"the ranks hold different plans for {what}: {listing}. "
        "Give every rank the same config, model and environment variables"
    )
